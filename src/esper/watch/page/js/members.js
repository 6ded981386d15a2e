// All members, and one of them in depth: its network now, its slots over time, its accuracy against compute.

import { Chart } from "./charts.js";
import { css, seriesColour } from "./colours.js";
import { fill, h, panel } from "./dom.js";
import { fixed, percent, short } from "./format.js";
import { drawNetwork } from "./network.js";
import { factor, makeMemberRate } from "./rates.js";
import { state, update } from "./state.js";
import { drawStrip } from "./strip.js";
import { makeWallPanel, selectedRow } from "./wall_panel.js";

export function makeMembers() {
  const wall = makeWallPanel({});
  const member = makeMember();
  const root = h("div", { class: "view members" }, wall.root, member.root);
  let moment = null;
  const view = {
    root,
    frame: wall.frame,
    step: (now) => view.update(now),
    update(now) {
      moment = now;
      wall.update(now);
      member.update(now, selectedRow(now) ?? wall.order()[0] ?? null);
    },
    // Up and down the order in which the members are shown.
    walk(by) {
      const order = wall.order();
      if (!order.length || !moment?.trajectories) return;
      const place = order.indexOf(selectedRow(moment));
      const next = place < 0 ? 0 : Math.min(Math.max(place + by, 0), order.length - 1);
      update({ member: moment.trajectories.columns.members[order[next]] });
    },
  };
  return view;
}

function makeMember() {
  const { root, body, side } = panel("Member", "", "member");
  const title = root.querySelector("h2");
  const figures = h("div", { class: "figures" });
  const drawing = h("div", { class: "wide drawing", tabindex: 0 });
  const strip = h("canvas", { class: "strip", role: "img", "aria-label": "the life of every slot" });
  const accuracy = new Chart("Accuracy over steps", {
    hint: "dashed: median of all members",
    yName: "accuracy, %",
    form: (v) => fixed(v, 1),
    height: 150,
    filling: true,
    xName: "step",
    onPick: (step) => update({ step: Math.max(step - 1, 0) }),
  });
  const compute = new Chart("Accuracy against compute", {
    hint: "training FLOPs since the episode began",
    yName: "accuracy, %",
    form: (v) => fixed(v, 1),
    height: 150,
    filling: true,
    xName: "FLOPs",
  });
  compute.xForm = short;
  const rate = makeMemberRate();
  body.append(figures, drawing, strip, rate.root, h("div", { class: "pair" }, accuracy.root, compute.root));
  return {
    root,
    update(moment, n) {
      const { trajectories, t } = moment;
      if (!trajectories || n === null) {
        title.textContent = "Member";
        fill(figures, h("p", { class: "empty" }, "choose a member on the wall"));
        fill(drawing);
        return;
      }
      title.textContent = trajectories.title(n).replace(/^m/, "M");
      fill(side, state.member === null ? h("span", { class: "hint" }, "the first of this order") : null);
      fill(figures, figuresOf(trajectories, n, t));
      fill(drawing, drawNetwork(trajectories, n, t));
      drawStrip(strip, trajectories, n, t);
      const colour = seriesColour(Math.max(moment.runs.indexOf(moment.focus), 0));
      const lines = courses(trajectories, n, colour);
      rate.update(trajectories, n, t, colour);
      accuracy.update({ ...lines.steps, mark: t + 1 });
      compute.update({ ...lines.compute, mark: trajectories.at("spent", t + 1, n) });
    },
  };
}

function figuresOf(trajectories, n, t) {
  const figure = (name, value) => h("div", {}, h("span", {}, name), h("b", {}, value));
  const ratio = trajectories.at("parameters", t + 1, n) / trajectories.at("parameters", 0, n);
  return [
    figure("accuracy", percent(trajectories.at("accuracy", t + 1, n))),
    figure("at the beginning", percent(trajectories.at("accuracy", 0, n))),
    figure("parameters", `× ${fixed(ratio, 2)}`),
    figure("compute", `${short(trajectories.at("spent", t + 1, n))}FLOP`.replace(" FLOP", "FLOP")),
    figure("return", fixed(trajectories.columns.returns[n], 3, true)),
    trajectories.columns.rate && figure("learning rate", factor(trajectories.at("rate", t + 1, n))),
  ];
}

function courses(trajectories, n, colour) {
  const steps = [...Array(trajectories.T + 1).keys()];
  const mine = (name, u) => trajectories.at(name, u, n);
  const median = steps.map((u) => middle(trajectories, u));
  const y = steps.map((u) => 100 * mine("accuracy", u));
  const line = { name: "this member", colour, y };
  const others = { name: "median", colour: css("--muted"), y: median, dash: [4, 4], width: 1.2 };
  const spent = steps.map((u) => mine("spent", u));
  // A member that has spent its budget stands still, which is no news.
  const known =
    spent.at(-1) > 0 && spent.every((value, u) => Number.isFinite(value) && value >= (spent[u - 1] ?? 0));
  return {
    steps: { x: steps, lines: [line, others] },
    compute: { x: known ? spent : [], lines: [{ ...line, name: "" }] },
  };
}

function middle(trajectories, u) {
  trajectories.medians ??= new Map();
  if (!trajectories.medians.has(u)) {
    const row = trajectories.columns.accuracy.slice(u * trajectories.N, (u + 1) * trajectories.N).sort();
    trajectories.medians.set(u, 100 * row[row.length >> 1]);
  }
  return trajectories.medians.get(u);
}

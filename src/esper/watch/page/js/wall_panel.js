// The wall of members with its legend, its order and its choice.

import { grownColour, inkOn, shaded, stageColour, stageLetter, stageMeaning } from "./colours.js";
import { fill, h, panel, swatch } from "./dom.js";
import { fixed, percent, words } from "./format.js";
import { state, update } from "./state.js";
import { chosen, SORTS, Wall } from "./wall.js";

export function makeWallPanel({ compact = false }) {
  const { root, body, side } = panel("Members", "", "wall");
  const hint =
    root.querySelector("header .hint") ??
    root.querySelector("header").insertBefore(h("span", { class: "hint" }), side);
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "all members" });
  const legend = h("div", { class: "legend" });
  const tip = h("div", { class: "tip", hidden: true });
  const empty = h("p", { class: "empty", hidden: true });
  const controls = makeControls();
  side.append(controls.root);
  body.append(canvas, empty, legend, tip);
  const held = { key: "", order: [], moment: null };
  const wall = new Wall(canvas, {
    onPick(row) {
      if (row === null || !held.moment?.trajectories) return;
      update({ member: held.moment.trajectories.columns.members[row], view: compact ? "members" : state.view });
    },
    onHover: (row, event) => point(tip, wall, row, event, held.moment),
  });
  const view = {
    root,
    wall,
    order: () => held.order,
    frame(step) {
      if (held.moment?.trajectories) wall.show(held.moment.trajectories, held.order, step, selectedRow(held.moment));
    },
    update(moment) {
      held.moment = moment;
      const { trajectories, focus } = moment;
      empty.hidden = Boolean(trajectories);
      canvas.hidden = !trajectories;
      if (!trajectories) {
        const none = focus?.facts && moment.shown === null && "this folder keeps no members";
        empty.textContent = none || focus?.unread.get(moment.shown) || "…";
        fill(legend);
        hint.textContent = "";
        return;
      }
      const moving = state.filter.startsWith("now:") ? moment.t : "";
      const key = [focus.name, moment.shown, focus.version, state.sort, state.filter, moving].join("\n");
      if (key !== held.key || held.trajectories !== trajectories) {
        Object.assign(held, { key, trajectories, order: chosen(trajectories, state.sort, state.filter, moment.step) });
      }
      const some = held.order.length === trajectories.N ? "" : `${held.order.length.toLocaleString("en")} of `;
      hint.textContent = `${some}${trajectories.N.toLocaleString("en")} in ${trajectories.name}, step ${moment.t + 1}`;
      const { N, T, S } = trajectories;
      canvas.setAttribute("aria-label", `${some}${N} members, ${T} steps, ${S} slots each`);
      controls.update(trajectories);
      drawLegend(legend, trajectories, moment.t);
      view.frame(moment.step);
    },
  };
  new ResizeObserver(() => view.frame(held.moment?.step ?? 0)).observe(canvas);
  return view;
}

export function selectedRow({ trajectories }) {
  if (state.member === null || !trajectories) return null;
  const row = trajectories.rowOf(state.member);
  return row < 0 ? null : row;
}

function makeControls() {
  const sort = h("select", { "aria-label": "order of the members", title: "order" });
  fill(
    sort,
    Object.entries(SORTS).map(([key, { name }]) => h("option", { value: key }, `by ${name}`)),
  );
  const filter = h("select", { "aria-label": "which members", title: "which members (/)", id: "filter" });
  sort.addEventListener("change", () => update({ sort: sort.value }));
  filter.addEventListener("change", () => update({ filter: filter.value }));
  let known = null;
  return {
    root: h("div", { class: "controls" }, sort, filter),
    update(trajectories) {
      const options = [
        ["", "all members"],
        ["rolled back", "rolled back"],
        ["refused", "refused by a gate"],
        ...Object.values(trajectories.stage_names).map((name) => [`now:${name}`, `now ${words(name)}`]),
        ...planted(trajectories).map((name) => [`ever:${name}`, `planted ${words(name)}`]),
        ...Object.values(trajectories.op_names)
          .slice(1)
          .map((name) => [`op:${name}`, `asked to ${words(name)}`]),
      ];
      if (!options.some(([value]) => value === state.filter)) options.push([state.filter, state.filter]);
      const key = JSON.stringify(options);
      if (key !== known)
        fill(
          filter,
          options.map(([value, name]) => h("option", { value }, name)),
        );
      known = key;
      sort.value = state.sort;
      filter.value = state.filter;
    },
  };
}

function planted(trajectories) {
  trajectories.planted ??= [...new Set(trajectories.columns.blueprint)]
    .filter((b) => b !== 255)
    .sort((a, b) => a - b)
    .map((b) => trajectories.blueprint_names[b])
    .filter(Boolean);
  return trajectories.planted;
}

// How many slots are in each stage at this step.
function drawLegend(root, trajectories, t) {
  const counts = {};
  const size = trajectories.N * trajectories.S;
  for (const stage of trajectories.columns.stage.subarray(t * size, (t + 1) * size))
    counts[stage] = (counts[stage] ?? 0) + 1;
  const gave = trajectories.folded.subarray(t * size, (t + 1) * size).reduce((sum, seeds) => sum + seeds, 0);
  const entries = Object.entries(trajectories.stage_names).filter(([, name]) => name !== "UNKNOWN");
  fill(
    root,
    entries.map(([value, name]) =>
      h(
        "span",
        { title: stageMeaning(name), class: counts[value] ? "" : "none" },
        stageMark(name),
        words(name),
        h("b", {}, percent((counts[value] ?? 0) / size, 0)),
      ),
    ),
    gave > 0 &&
      h(
        "span",
        { title: "seeds that became part of the host, and left their slot free" },
        swatch(grownColour()),
        "grown in, per member",
        h("b", {}, fixed(gave / trajectories.N, 2)),
      ),
  );
}

function stageMark(name) {
  const colour = stageColour(name);
  const faint = shaded(name, colour, 0);
  const shown = faint === colour ? colour : `linear-gradient(90deg, ${faint}, ${colour})`;
  return swatch(shown, stageLetter(name), inkOn(shaded(name, colour, 0.5)));
}

function point(tip, wall, row, event, moment) {
  tip.hidden = row === null || !moment?.trajectories;
  if (tip.hidden) return;
  const { title, accuracy, slots } = wall.describe(row, moment.step);
  fill(
    tip,
    h("b", {}, title),
    ` ${accuracy}`,
    slots.map((slot, s) =>
      h(
        "div",
        {},
        stageMark(slot.stage),
        `${moment.trajectories.slots[s]} ${words(slot.stage)} `,
        slot.blueprint && h("em", {}, words(slot.blueprint)),
        slot.stage === "BLENDING" && ` α ${fixed(slot.alpha, 2)}`,
      ),
    ),
  );
  const box = wall.canvas.parentElement.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  tip.style.left = `${Math.min(x + 14, box.width - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(y + 14, box.height - tip.offsetHeight - 8)}px`;
}

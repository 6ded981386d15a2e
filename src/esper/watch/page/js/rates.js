// Learning rates that a controller sets: of one member with what was done to it, and of all members of a round.

import { Chart, shares, stacked } from "./charts.js";
import { css, seriesColour } from "./colours.js";
import { h } from "./dom.js";
import { finite, percent, words } from "./format.js";
import { update } from "./state.js";

// Of each choice: its mark over the steps, and its place among the hues. What is kept has no mark.
const CHOICES = { KEEP: ["", 7], DOUBLE: ["×2", 1], HALVE: ["÷2", 0], DECAY: ["↘", 3] };
const SPREAD = [0.1, 0.9]; // the middle 80 % of the members

// Rates differ by factors: the axis is of their logarithms, and is labelled with the factors.
const power = (rate) => (rate > 0 ? Math.log10(rate) : null);
export const factor = (rate) => (finite(rate) ? `× ${Number(rate.toPrecision(3))}` : "–");
const form = (value) => (finite(value) ? factor(10 ** value) : "–");
const tick = (value) => String(Number((10 ** value).toPrecision(1)));

const pickStep = (step) => update({ step: Math.max(step - 1, 0) });

function makeChart(title, hint, options) {
  return new Chart(title, { hint, yName: "× recipe", form, tick, xName: "step", onPick: pickStep, ...options });
}

// The rate of one member; hidden in rounds whose rates are the recipe's.
export function makeMemberRate() {
  const hint = "×2 doubled, ÷2 halved, ↘ decays from here; dashed: mean of all members";
  const chart = makeChart("Learning rate over steps", hint, { height: 150, classes: "rate" });
  return {
    root: chart.root,
    update(trajectories, n, t, colour) {
      chart.root.hidden = !trajectories?.columns.rate;
      if (chart.root.hidden) return;
      const steps = [...Array(trajectories.T + 1).keys()];
      const y = steps.map((u) => power(trajectories.at("rate", u, n)));
      const others = { name: "mean", colour: css("--muted"), dash: [4, 4], width: 1.2 };
      const lines = [
        { name: "this member", colour, y },
        { ...others, y: spreadOf(trajectories).mean },
      ];
      const marks = choicesOf(trajectories, n).map(({ step, name }) => ({
        x: step + 1,
        y: y[step + 1] ?? y[step],
        text: CHOICES[name]?.[0] ?? name,
      }));
      chart.update({ x: steps, lines, marks, mark: t + 1 });
      chart.body.dataset.marks = marks.map(({ x, text }) => `${x} ${text}`).join(", ");
    },
  };
}

// What was done to a member's rate, where it was not kept.
export function choicesOf(trajectories, n) {
  const found = [];
  for (let step = 0; step < trajectories.T; step++) {
    const name = trajectories.rate_names[trajectories.at("rate_choice", step, n)];
    if (name !== "KEEP") found.push({ step, name });
  }
  return found;
}

// Mean and spread of the rates of all members, and what was done to them, over the steps of a round.
export function makeRates() {
  const course = makeChart("Learning rate, step by step", "geometric mean, and the middle 80 % of the members");
  const ops = new Chart("What is done to the rate", {
    hint: "share of the members",
    yName: "share of members",
    form: (value) => percent(value, 0),
    range: shares,
    xName: "step",
    onPick: pickStep,
  });
  const root = h("div", { class: "pair rates" }, course.root, ops.root);
  return {
    root,
    update({ trajectories, t }) {
      root.hidden = !trajectories?.columns.rate;
      if (root.hidden) return;
      const { mean, low, high } = spreadOf(trajectories);
      const x = mean.map((_, u) => u);
      const spoken = (u) => `${form(mean[u])} (${form(low[u])} to ${form(high[u])})`;
      course.update({ x, lines: [{ name: "mean", colour: seriesColour(0), y: mean, low, high, spoken }], mark: t + 1 });
      ops.update({ ...sharesOf(trajectories), mark: t + 1, stacked: true });
    },
  };
}

// Logarithms of the mean and of the ends of the spread at each step; where all rates have fallen to 0 there is none.
export function spreadOf(trajectories) {
  if (trajectories.spread) return trajectories.spread;
  const { N, T, columns } = trajectories;
  const [mean, low, high] = [[], [], []];
  for (let u = 0; u <= T; u++) {
    const row = [...columns.rate.slice(u * N, (u + 1) * N)].map(power).filter(finite);
    row.sort((a, b) => a - b);
    const at = (share) => row[Math.round(share * (row.length - 1))] ?? null;
    mean.push(row.length ? row.reduce((sum, value) => sum + value, 0) / row.length : null);
    low.push(at(SPREAD[0]));
    high.push(at(SPREAD[1]));
  }
  trajectories.spread = { mean, low, high };
  return trajectories.spread;
}

function sharesOf({ N, T, columns, rate_names: names }) {
  const x = [...Array(T).keys()].map((t) => t + 1);
  const parts = Object.entries(names).map(([value, name]) => ({
    name: words(name),
    colour: seriesColour(CHOICES[name]?.[1] ?? 4),
    y: x.map((_, t) => columns.rate_choice.slice(t * N, (t + 1) * N).filter((c) => c === Number(value)).length / N),
  }));
  return { x, lines: stacked(x, parts) };
}

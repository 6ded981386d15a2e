// The first view: figures, curves with intervals, and all members at once.

import { makeCards } from "./cards.js";
import { aligned, Chart, onOneAxis } from "./charts.js";
import { seriesColour } from "./colours.js";
import { drawResults } from "./compare.js";
import { fill, h } from "./dom.js";
import { finite, fixed } from "./format.js";
import { makeOutcome } from "./outcome.js";
import { plotWidth } from "./plots.js";
import { update } from "./state.js";
import { makeWallPanel } from "./wall_panel.js";

const pickRound = (round) => update({ round });
const CURVES = [
  {
    title: "Return",
    hint: "mean over members, 95 % interval",
    form: (v) => fixed(v, 3),
    pick: (r) => [r.return_mean, r.return_ci],
  },
  {
    title: "Above ungrown twins",
    hint: "the same networks with and without growth",
    yName: "return above twins",
    form: (v) => fixed(v, 3),
    pick: (r) => [r.extra.above_twin, r.extra.above_twin_ci],
    optional: true,
  },
  {
    title: "Accuracy",
    hint: "validation",
    yName: "accuracy, %",
    form: (v) => fixed(v, 1),
    pick: (r) => [100 * r.accuracy_mean, 100 * r.accuracy_ci],
  },
  {
    title: "Parameters",
    hint: "times the host's own",
    yName: "× host",
    form: (v) => fixed(v, 2),
    pick: (r) => [r.parameter_ratio_mean, r.parameter_ratio_ci],
  },
];

export function makeOverview() {
  const cards = makeCards();
  const charts = CURVES.map(({ title, pick, optional, ...options }) => ({
    pick,
    optional,
    chart: new Chart(title, { ...options, sync: "rounds", onPick: pickRound, height: 150, filling: true }),
  }));
  const [reward, twins, accuracy, parameters] = charts.map(({ chart }) => chart.root);
  const score = new Chart("Score", {
    hint: "of validation",
    yName: "score",
    form: (v) => fixed(v, 3),
    filling: true,
  });
  const wall = makeWallPanel({ compact: true });
  const outcome = makeOutcome();
  const results = makeResults();
  const root = h(
    "div",
    { class: "view overview" },
    outcome.root,
    results.root,
    cards.root,
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "curves" },
        h("div", { class: "pair" }, reward, score.root, twins),
        h("div", { class: "pair" }, accuracy, parameters),
      ),
      wall.root,
    ),
  );
  const view = {
    root,
    frame: wall.frame,
    step: (moment) => (moment.focus?.growth ? view.update(moment) : wall.update(moment)),
    update(moment) {
      cards.update(moment);
      outcome.update(moment.focus);
      const mark = moment.record && !moment.live ? moment.record.round : null;
      const runs = moment.runs.filter((run) => run.rounds.length);
      root.classList.toggle("quiet", !runs.length);
      results.update(moment.focus);
      const growing = moment.runs.filter((run) => run.growth);
      score.root.hidden = !moment.focus?.growth;
      reward.hidden = !score.root.hidden;
      if (!score.root.hidden) drawScores(score, growing, moment);
      for (const { chart, pick, optional } of charts) {
        const known = optional ? runs.filter((run) => run.rounds.some((r) => finite(pick(r)[0]))) : runs;
        if (optional) chart.root.hidden = !known.length;
        chart.xName = moment.focus?.unit ?? "round";
        chart.update({ ...curves(known, moment.runs, pick), mark });
      }
      const plain = moment.focus?.growth?.controller === "static"; // a model that trained without growth
      accuracy.hidden = parameters.hidden = plain; // the score says the one, and the other stands still
      root.classList.toggle("ungrown", plain);
      wall.root.hidden = plain || (!runs.length && moment.shown === null); // there are results only
      wall.update(moment);
    },
  };
  return view;
}

// The scores of growing models: over the epochs, or over the compute where there is something to compare.
function drawScores(chart, growing, moment) {
  const all = growing.flatMap((run) =>
    run.growth.curves.map((curve, i) => ({
      name: growing.length > 1 ? `${run.name} ${curve.name}` : curve.name,
      colour: seriesColour(growing.length > 1 ? moment.runs.indexOf(run) : i),
      dash: i ? [6, 3 * i] : undefined,
      curve,
    })),
  );
  const several = all.length > 1;
  const whole = moment.focus.growth.curves[0]?.flops.at(-1) || 1;
  const placeOf = ({ flops }, i) => (several ? (100 * flops[i]) / whole : i);
  const own = all.map(({ curve, ...line }) => ({
    ...line,
    x: curve.score.map((_, i) => placeOf(curve, i)),
    y: curve.score,
  }));
  chart.xName = several ? "compute, %" : "epoch";
  chart.xForm = (value) => (several ? fixed(value, 0) : value.toLocaleString("en"));
  const first = moment.focus.growth.curves[0];
  const mark = moment.live || !first ? null : placeOf(first, moment.t + 1);
  chart.update({ ...onOneAxis(own), mark });
}

// Networks beside each other, where the run compared some.
function makeResults() {
  const root = h("div", { class: "outcome" });
  const charts = {};
  let drawn = "";
  return {
    root,
    update(focus) {
      const shown = focus && !focus.growth && focus.facts?.results?.controllers?.length;
      const { theme } = document.documentElement.dataset;
      const key = shown ? [focus.name, focus.version, theme, plotWidth()].join() : "";
      if (key !== drawn) fill(root, shown && drawResults(focus, charts));
      root.hidden = !shown;
      drawn = key;
    },
  };
}

// One line with its interval for each run.
export function curves(runs, all, pick) {
  const { x, columns } = aligned(runs, pick);
  const alone = runs.length === 1;
  const lines = runs.map((run, i) =>
    line(columns[i], alone ? "mean" : run.name, seriesColour(all.indexOf(run))),
  );
  return { x, lines };
}

function line({ y, low, high, sure }, name, colour) {
  return sure ? { name, colour, y, low, high } : { name, colour, y };
}

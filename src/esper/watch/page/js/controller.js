// What the controller does and how it learns.

import { aligned, Chart, shares, stacked } from "./charts.js";
import { opColour, opMeaning, seriesColour } from "./colours.js";
import { h, panel } from "./dom.js";
import { finite, fixed, percent, words } from "./format.js";
import { curves } from "./overview.js";
import { makeRates } from "./rates.js";
import { update } from "./state.js";

const pickRound = (round) => update({ round });
const whole = (value) => percent(value, 0);
const HEALTH = [
  ["KL", "kl", "how far an update went", 4],
  ["Explained variance", "explained_variance", "1 is all of it", 2],
  ["Value loss", "value_loss", "", 3],
  ["Entropy", "entropy", "", 2],
  ["Clipped", "clip_fraction", "share of ratios", 3, "share"],
  ["Gradient", "gradient_norm", "norm before clipping", 2, "norm"],
];

export function makeController() {
  const over = { sync: "rounds", onPick: pickRound };
  const ops = new Chart("Ops, round by round", {
    ...over,
    hint: "a refused action counts as waiting",
    yName: "share of ops",
    form: whole,
    range: shares,
  });
  const steps = new Chart("Ops, step by step", {
    hint: "over the episode",
    yName: "share of ops",
    form: whole,
    range: shares,
    xName: "step",
    onPick: (step) => update({ step: step - 1 }),
  });
  const heads = new Chart("Entropy of each head", {
    ...over,
    hint: "1 chooses evenly among what is legal, 0 is certain",
    yName: "entropy",
    form: (v) => fixed(v, 2),
    range: shares,
  });
  const seeds = new Chart("Blueprints planted", {
    ...over,
    hint: "seeds per member",
    yName: "seeds per member",
    form: (v) => fixed(v, 2),
  });
  const health = HEALTH.map(([title, key, hint, digits, yName]) => ({
    key,
    chart: new Chart(title, { ...over, hint, yName, form: (v) => fixed(v, digits), height: 140 }),
  }));
  const rates = makeRates();
  const none = panel("Controller");
  none.body.append(
    h("p", { class: "empty" }, "No controller was trained in this run. Its members show what grew, and when."),
  );
  const charts = [ops, steps, heads, seeds, ...health.map(({ chart }) => chart)];
  const root = h(
    "div",
    { class: "view controller" },
    none.root,
    h("div", { class: "pair" }, ops.root, steps.root),
    rates.root,
    h("div", { class: "pair" }, heads.root, seeds.root),
    h(
      "div",
      { class: "three" },
      health.map(({ chart }) => chart.root),
    ),
  );
  const step = (moment) => {
    steps.update({ ...opsByStep(moment.record), mark: moment.t + 1, stacked: true });
    rates.update(moment);
  };
  return {
    root,
    step,
    update(moment) {
      const { focus, record, runs, live } = moment;
      const mark = record && !live ? record.round : null;
      const rounds = focus?.rounds ?? [];
      ops.update({ ...opsByRound(rounds), mark, stacked: true });
      step(moment);
      heads.update({ ...byName(rounds, (r) => r.heads, words), mark });
      seeds.update({ ...planted(rounds), mark });
      const learning = runs.filter((run) => run.rounds.length);
      for (const { key, chart } of health) {
        const known = learning.filter((run) => run.rounds.some((r) => finite(r[key])));
        chart.update({ ...curves(known, runs, (r) => [r[key], NaN]), mark });
      }
      // A training has nothing yet; a comparison or a growth never gets what only a training has.
      const training = focus?.trains ?? true;
      for (const chart of charts) chart.root.hidden = !training && !chart.has;
      none.root.hidden = training || !rates.root.hidden || charts.some((chart) => chart.has);
    },
  };
}

function opsByRound(rounds) {
  const names = Object.keys(rounds.at(-1)?.ops ?? {});
  const x = rounds.map((record) => record.round);
  return {
    x,
    lines: stacked(
      x,
      names.map((name) =>
        opPart(
          name,
          rounds.map((record) => record.ops[name] ?? 0),
        ),
      ),
    ),
  };
}

function opsByStep(record) {
  if (!record?.byStep) return { x: [], lines: [] };
  const x = record.byStep.map((_, t) => t + 1);
  const names = Object.keys(record.ops);
  return {
    x,
    lines: stacked(
      x,
      names.map((name, i) =>
        opPart(
          name,
          record.byStep.map((row) => row[i]),
        ),
      ),
    ),
  };
}

const opPart = (name, y) => ({ name: words(name), colour: opColour(name), y, title: opMeaning(name) });

// One line for each name in a record's table.
function byName(rounds, tableOf, label) {
  const names = [...new Set(rounds.flatMap((record) => Object.keys(tableOf(record))))];
  const run = { rounds };
  const { x } = aligned([run], () => [NaN]);
  const lines = names.map((name, i) => ({
    name: label(name),
    colour: seriesColour(i),
    dash: i > 7 ? [4, 3] : undefined,
    y: aligned([run], (record) => [tableOf(record)[name]]).columns[0].y,
  }));
  return { x, lines };
}

const PLANTED = "planted/";

function planted(rounds) {
  const tables = rounds.map((record) =>
    Object.entries(record.extra).filter(([name]) => name.startsWith(PLANTED)),
  );
  const cut = rounds.map((record, i) => ({ round: record.round, seeds: Object.fromEntries(tables[i]) }));
  const named = [...new Set(tables.flat().map(([name]) => name))];
  for (const { seeds } of cut) for (const name of named) seeds[name] ??= 0;
  return byName(
    cut,
    (record) => record.seeds,
    (name) => words(name.slice(PLANTED.length)),
  );
}

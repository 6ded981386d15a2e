// Runs and controllers beside each other: last figures, differences with intervals, accuracy against size.

import { seriesColour } from "./colours.js";
import { Chart, onOneAxis } from "./charts.js";
import { fill, h, panel, swatch, table } from "./dom.js";
import { finite, fixed, interval, short, times } from "./format.js";
import { drawDifferences, drawFrontier, plotWidth } from "./plots.js";

const QUANTITIES = {
  test_accuracy: { name: "test accuracy, points", scale: 100, form: (v) => fixed(v, 2, true) },
  parameters: { name: "parameters", scale: 1, form: (v) => (v < 0 ? "" : "+") + short(v) },
  potential: { name: "Φ", scale: 1, form: (v) => fixed(v, 4, true) },
  flops: { name: "FLOPs", scale: 1, form: (v) => (v < 0 ? "" : "+") + short(v) },
};

const COSTS = new Set(["parameters", "flops"]); // more of them is neither good nor bad

export function makeCompare() {
  const lasts = panel("The last rounds", "means over members, 95 % intervals");
  const results = h("div", { class: "results" });
  const growths = h("div", { class: "results" });
  const root = h("div", { class: "view comparing" }, lasts.root, growths, results);
  const held = { drawn: "" };
  return {
    root,
    update(moment) {
      const trained = moment.runs.filter((run) => run.rounds.length && !run.growth);
      lasts.root.hidden = !trained.length;
      fill(lasts.body, drawLasts(trained, moment.runs));
      const folders = moment.runs.filter((run) => run.facts?.results?.controllers?.length);
      const now =
        folders.map((run) => `${run.name}${run.version}`).join() +
        document.documentElement.dataset.theme +
        plotWidth();
      if (now !== held.drawn)
        fill(
          results,
          folders.map((run) => drawResults(run)),
        );
      held.drawn = now;
      const growing = moment.runs.filter((run) => run.growth?.curves.length);
      growths.hidden = !growing.length;
      fill(
        growths,
        growing.map((run) => drawGrowth(run)),
      );
    },
  };
}

function drawLasts(trained, runs) {
  const figure = (last, quantity, scale, digits) =>
    interval(times(last[`${quantity}_mean`], scale), times(last[`${quantity}_ci`], scale), (v) =>
      fixed(v, digits),
    );
  return table(
    ["run", "round", "return", "validation accuracy", "parameters"],
    trained.map(({ name, last }) => [
      h("span", {}, swatch(seriesColour(runs.findIndex((run) => run.name === name))), name),
      last.round,
      figure(last, "return", 1, 3),
      `${figure(last, "accuracy", 100, 1)} %`,
      `× ${figure(last, "parameter_ratio", 1, 2)}`,
    ]),
  );
}

// Bold where the interval excludes 0; the colour says on which side.
function verdict({ mean, ci, quantity }) {
  const { scale, form } = QUANTITIES[quantity] ?? { scale: 1, form: (v) => fixed(v, 3, true) };
  const clear = finite(ci) && Math.abs(mean) > ci;
  const text = interval(times(mean, scale), times(ci, scale), form);
  return h("b", { class: !clear ? "level" : COSTS.has(quantity) ? "" : mean > 0 ? "above" : "below" }, text);
}

// A growing model beside the same one without growth and a wider one, at equal compute.
function drawGrowth(run) {
  const { curves, model, controller, score_name, verdicts } = run.growth;
  const shown = panel(`${model} in ${run.name}`, `grown by ${controller}; validation ${score_name}`);
  shown.body.append(
    table(
      ["model", score_name, "parameters", "training FLOPs", "epochs"],
      curves.map(({ name, score, parameters, flops }, i) => [
        h("span", {}, swatch(seriesColour(i)), name),
        fixed(score.at(-1), 3),
        short(parameters.at(-1)),
        short(flops.at(-1)),
        score.length - 1,
      ]),
    ),
    ...verdicts.map((text) => h("p", { class: "hint" }, text)),
  );
  return shown.root;
}

function drawResults(run) {
  const { controllers, task, host } = run.facts.results;
  const shown = panel(
    `Controllers in ${run.name}`,
    `${task}, host ${host}; test data, means with 95 % intervals`,
  );
  shown.body.append(
    table(
      ["controller", "members", "test accuracy", "parameters", "Φ", "FLOPs"],
      controllers.map((c, i) => {
        const told = (quantity, scale, form) =>
          interval(times(c.figures[quantity]?.mean, scale), times(c.figures[quantity]?.ci, scale), form);
        return [
          h("span", {}, swatch(seriesColour(i)), c.name),
          c.members.length,
          `${told("test_accuracy", 100, (v) => fixed(v, 2))} %`,
          told("parameters", 1, short),
          told("potential", 1, (v) => fixed(v, 4)),
          told("flops", 1, short),
        ];
      }),
    ),
  );
  return h("div", {}, shown.root, resultPictures(run));
}

// Accuracy against size, and how far each controller lies from the first.
export function resultPictures(run) {
  const { controllers, differences } = run.facts.results;
  const frontier = panel("The frontier", "up is more accurate, left is smaller; faint points are members");
  frontier.body.append(drawFrontier(controllers));
  const paired = panel("Differences, member by member", "the same members under both, 95 % intervals");
  const accuracy = differences.filter(
    (gap) => gap.quantity === "test_accuracy" && gap.baseline === controllers[0].name,
  );
  if (accuracy.length) paired.body.append(drawDifferences(accuracy, controllers[0].name));
  paired.body.append(
    table(
      ["controller", "against", "quantity", "difference"],
      differences.map((gap) => [
        gap.controller,
        gap.baseline,
        QUANTITIES[gap.quantity]?.name ?? gap.quantity,
        verdict(gap),
      ]),
    ),
  );
  return [
    h("div", { class: "pair" }, frontier.root, differences.length ? paired.root : null),
    computeCurves(run),
  ];
}

// The means of every controller on the way, where they were kept.
function computeCurves(run) {
  const curves = run.facts.results.controllers.map(({ name, curve }, i) => ({
    name,
    colour: seriesColour(i),
    dash: i > 7 ? [4, 3] : undefined,
    x: curve.map(({ flops }) => flops),
    y: curve.map(({ accuracy }) => times(accuracy, 100)),
  }));
  if (!curves.some(({ x }) => x.length > 1)) return null;
  run.compute ??= new Chart("Accuracy against compute", {
    hint: "validation, means over members",
    yName: "accuracy, %",
    xName: "FLOPs",
    form: (v) => fixed(v, 1),
    height: 240,
  });
  run.compute.xForm = short;
  run.compute.update(onOneAxis(curves));
  return run.compute.root;
}

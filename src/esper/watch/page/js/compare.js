// Runs and controllers beside each other: last figures, differences with intervals, score against compute.

import { seriesColour } from "./colours.js";
import { Chart, onOneAxis } from "./charts.js";
import { fill, h, panel, swatch, table } from "./dom.js";
import { finite, fixed, interval, short, times } from "./format.js";
import { drawDifferences, plotWidth } from "./plots.js";

const QUANTITIES = {
  test_loss: { name: "test loss", scale: 1, form: (v) => fixed(v, 3, true) },
  test_accuracy: { name: "test accuracy, points", scale: 100, form: (v) => fixed(v, 2, true) },
  parameters: { name: "parameters", scale: 1, form: (v) => (v < 0 ? "" : "+") + short(v) },
  potential: { name: "accuracy less rent", scale: 1, form: (v) => fixed(v, 4, true) },
  flops: { name: "FLOPs", scale: 1, form: (v) => (v < 0 ? "" : "+") + short(v) },
  seconds: { name: "seconds", scale: 1, form: (v) => fixed(v, 1, true) },
};

const COSTS = new Set(["parameters", "flops", "seconds"]); // more of them is neither good nor bad

export function makeCompare() {
  const lasts = panel("The last rounds", "means over members, 95 % intervals");
  const results = h("div", { class: "results" });
  const growths = h("div", { class: "results" });
  const root = h("div", { class: "view comparing" }, lasts.root, growths, results);
  const held = { drawn: "", charts: {} };
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
          folders.map((run) => drawResults(run, held.charts)),
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
  return h("b", { class: !clear ? "level" : COSTS.has(quantity) ? "" : mean > 0 === (quantity !== "test_loss") ? "above" : "below" }, text);
}

// A growing model beside the same one without growth and a wider one, at equal compute.
function drawGrowth(run) {
  const { curves, model, controller, score_name, verdicts } = run.growth;
  const shown = panel(`${model} in ${run.name}`, `controller ${controller}; validation ${score_name}`);
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

// A table of the networks that were compared, and pictures of it; `charts` keeps those of a view.
export function drawResults(run, charts) {
  const { controllers, task, host } = run.facts.results;
  const shown = panel(
    run.facts.kind === "demo" ? "The networks" : `Controllers in ${run.name}`,
    `${task}, ${host}; test data, means with 95 % intervals`,
  );
  const columns = [
    ["test loss", "test_loss", 1, (v) => fixed(v, 3)],
    ["test accuracy, %", "test_accuracy", 100, (v) => fixed(v, 2)],
    ["parameters", "parameters", 1, short],
    ["accuracy less rent", "potential", 1, (v) => fixed(v, 4)],
    ["FLOPs", "flops", 1, short],
    ["seconds", "seconds", 1, (v) => fixed(v, 1)],
  ].filter(([, quantity]) => controllers.some((c) => finite(c.figures[quantity]?.mean)));
  shown.body.append(
    table(
      ["network", "networks each", ...columns.map(([title]) => title)],
      controllers.map((c, i) => [
        h("span", {}, swatch(seriesColour(i)), c.name),
        c.members.length,
        ...columns.map(([, quantity, scale, form]) =>
          interval(times(c.figures[quantity]?.mean, scale), times(c.figures[quantity]?.ci, scale), form),
        ),
      ]),
    ),
  );
  return h("div", { class: "outcome" }, shown.root, resultPictures(run, charts));
}

// Score against compute, and how far each network lies from the first.
function resultPictures(run, charts) {
  const { controllers, differences } = run.facts.results;
  const losses = controllers.some((c) => c.test_loss.length);
  const paired = panel("Differences, network by network", "the same first weights and data, 95 % intervals");
  const quantity = losses ? "test_loss" : "test_accuracy";
  const shown = differences.filter(
    (gap) => gap.quantity === quantity && gap.baseline === controllers[0].name,
  );
  if (shown.length) paired.body.append(drawDifferences(shown, controllers[0].name, quantity));
  const quantities = [...new Set(differences.map((gap) => gap.quantity))];
  const rows = controllers.slice(1).map(({ name }) => [
    name,
    ...quantities.map((wanted) => {
      const gap = differences.find((d) => d.controller === name && d.quantity === wanted);
      return gap ? verdict(gap) : "";
    }),
  ]);
  const names = quantities.map((wanted) => QUANTITIES[wanted]?.name ?? wanted);
  paired.body.append(table([`against ${controllers[0].name}`, ...names], rows));
  const [compute, seconds] = ["flops", "seconds"].map((cost) => computeCurves(run, cost, losses, charts));
  return [
    (compute || seconds) && h("div", { class: "pair" }, compute, seconds),
    differences.length > 0 && paired.root,
  ];
}

// The means of every controller on the way, where they were kept.
function computeCurves(run, cost, losses, charts) {
  const curves = run.facts.results.controllers.map(({ name, curve }, i) => ({
    name,
    colour: seriesColour(i),
    dash: [undefined, [8, 4], [3, 3], [10, 3, 3, 3]][i % 4],
    x: curve.map((point) => point[cost]),
    y: curve.map(({ accuracy, loss }) => (losses ? loss : times(accuracy, 100))),
  }));
  if (!curves.some(({ x }) => x.filter(finite).length > 1)) return null;
  const title = `${losses ? "Loss" : "Accuracy"} against ${cost === "flops" ? "compute" : "time"}`;
  const chart = (charts[run.name + title] ??= new Chart(title, {
    hint: `validation, means over networks${losses ? "; down is better" : ""}`,
    yName: losses ? "loss" : "accuracy, %",
    xName: cost === "flops" ? "FLOPs" : "seconds of one core",
    form: (v) => fixed(v, losses ? 2 : 1),
    height: 260,
  }));
  chart.xForm = short;
  chart.update(onOneAxis(curves));
  return chart.root;
}

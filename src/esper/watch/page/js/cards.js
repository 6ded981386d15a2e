// The figures that a person looks at first.

import { seriesColour } from "./colours.js";
import { fill, h } from "./dom.js";
import { duration, finite, fixed, interval, percent, short } from "./format.js";
import { pace } from "./store.js";

export function makeCards() {
  const root = h("div", { class: "cards" });
  return { root, update: (moment) => fill(root, cardsOf(moment)) };
}

function cardsOf({ focus, record, runs }) {
  if (!focus || (!record && focus.facts?.results)) return [];
  if (!record) return [h("p", { class: "empty" }, "no round is finished yet")];
  const colour = seriesColour(runs.indexOf(focus));
  const card = (name, value, key, note = "") =>
    h(
      "div",
      { class: "card", "data-card": name },
      h("span", {}, name),
      figure(value),
      h("small", {}, note),
      key && sparkline(focus, key, colour, record.round),
    );
  const { rate, left } = pace(focus);
  const twin = record.extra.above_twin;
  const { growth } = focus;
  const plain = growth?.controller === "static";
  return [
    progress(focus, record, left),
    !growth &&
      card(
        "return",
        interval(record.return_mean, record.return_ci, (v) => fixed(v, 3, true)),
        (r) => r.return_mean,
        "mean over members",
      ),
    finite(twin) &&
      card(
        "above ungrown twins",
        interval(twin, record.extra.above_twin_ci, (v) => fixed(v, 3, true)),
        (r) => r.extra.above_twin,
        "against no growth",
      ),
    card(
      growth?.score_name ?? "accuracy",
      interval(100 * record.accuracy_mean, 100 * record.accuracy_ci, (v) => fixed(v, 1)) + " %",
      (r) => r.accuracy_mean,
      `validation, ${plain ? "latest epoch" : growth ? "before seeds are decided" : "end of episode"}`,
    ),
    !plain &&
      card(
        "parameters",
        `× ${interval(record.parameter_ratio_mean, record.parameter_ratio_ci, (v) => fixed(v, 2))}`,
        (r) => r.parameter_ratio_mean,
        "times the host's own",
      ),
    growth?.finished && outcome(growth),
    card(
      "throughput",
      short(rate),
      (r) => r.member_epochs / r.seconds,
      growth ? "epochs per second" : "member-epochs per second",
    ),
  ];
}

// The interval is smaller than the mean and goes to a line of its own where a card is narrow.
function figure(text) {
  const [mean, ci] = text.split(" ± ");
  return h("b", {}, mean, ci && h("i", {}, `± ${ci}`));
}

// What a growth came to, beside what it is measured against.
function outcome({ controller, curves, score_name }) {
  const told = curves.map(({ name, score }) => `${name} ${fixed(score.at(-1), 3)}`);
  return h(
    "div",
    { class: "card", "data-card": "outcome" },
    h("span", {}, `${score_name} in the end`),
    h("b", {}, fixed(curves[0]?.score.at(-1), 3)),
    h("small", {}, told.slice(1).join(", ") || (controller === "static" ? "of the best epoch" : "seeds decided")),
  );
}

function progress(focus, record, left) {
  const share = focus.last.round / Math.max(focus.last.rounds, 1);
  const around = 2 * Math.PI * 24;
  const running = focus.state === "running";
  return h(
    "div",
    { class: "card ring", "data-card": "progress" },
    h(
      "svg",
      { viewBox: "0 0 60 60", width: 54, height: 54, role: "img", "aria-label": percent(share, 0) },
      h("circle", { cx: 30, cy: 30, r: 24, class: "groove" }),
      h("circle", { cx: 30, cy: 30, r: 24, class: "arc", "stroke-dasharray": `${share * around} ${around}` }),
      h("text", { x: 30, y: 34 }, `${Math.floor(100 * share)}%`),
    ),
    h(
      "div",
      {},
      h("span", {}, `${focus.state || "run"}, ${focus.unit}s`),
      h(
        "b",
        { id: "rounds-done" },
        `${record.round.toLocaleString("en")} / ${record.rounds.toLocaleString("en")}`,
      ),
      h(
        "small",
        {},
        running && finite(left) ? `${duration(left)} left` : `in ${duration(focus.last.seconds)}`,
      ),
    ),
  );
}

function sparkline(run, key, colour, round) {
  const every = Math.max(Math.ceil(run.rounds.length / 120), 1);
  const points = run.rounds
    .filter((_, i) => (run.rounds.length - 1 - i) % every === 0)
    .map((record) => [record.round, key(record)])
    .filter(([, y]) => finite(y));
  if (points.length < 2) return null;
  const [ys, xs] = [points.map(([, y]) => y), points.map(([x]) => x)];
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => [
    (100 * (x - xs[0])) / Math.max(xs.at(-1) - xs[0], 1e-9),
    high - low > 1e-9 * Math.abs(high) ? 26 - (24 * (y - low)) / (high - low) : 14,
  ];
  const line = points.map((point) =>
    place(point)
      .map((v) => v.toFixed(1))
      .join(","),
  );
  const now = points.findLast(([x]) => x <= round) ?? points[0];
  const [cx, cy] = place(now);
  return h(
    "svg",
    { class: "spark", viewBox: "-2 -1 104 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("polyline", { points: line.join(" "), stroke: colour }),
    h("circle", { cx, cy, r: 1.6, fill: colour }),
  );
}

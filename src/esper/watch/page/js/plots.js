// Two pictures of results: accuracy against size, and differences with their intervals.

import { css, seriesColour } from "./colours.js";
import { h } from "./dom.js";
import { finite, fixed, short, times } from "./format.js";

const H = 300;
const PAD = { left: 48, right: 16, top: 16, bottom: 38 };
const LETTER = 7.2; // average width of a bold letter of a name, in pixels

// Drawn at the size of the screen, so that words stay as large as elsewhere.
export function plotWidth() {
  const width = document.documentElement.clientWidth;
  return Math.round(width > 1080 ? Math.min((width - 54) / 2 - 36, 900) : Math.min(width - 76, 720));
}

export function drawFrontier(controllers) {
  const points = controllers.flatMap((c, i) =>
    c.parameters
      .map((x, m) => ({ i, x, y: times(c.test_accuracy[m], 100) }))
      .filter(({ x, y }) => finite(x) && finite(y) && x > 0),
  );
  if (!points.length) return h("p", { class: "empty" }, "nothing was measured");
  const W = plotWidth();
  const [xs, ys] = [points.map((p) => Math.log(p.x)), points.map((p) => p.y)];
  const [x0, x1] = spread(xs);
  const [y0, y1] = spread(ys);
  const X = (x) => PAD.left + ((Math.log(x) - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const Y = (y) => H - PAD.bottom - ((y - y0) / (y1 - y0)) * (H - PAD.top - PAD.bottom);
  const nodes = [...axisY(y0, y1, Y, W), ...axisX(x0, x1, X, W)];
  for (const { i, x, y } of points) {
    nodes.push(h("circle", { cx: X(x), cy: Y(y), r: 2.6, fill: seriesColour(i), opacity: 0.32 }));
  }
  const means = controllers.flatMap((c, i) => {
    const mine = points.filter((p) => p.i === i);
    if (!mine.length) return [];
    const mean = (key) => mine.reduce((sum, p) => sum + p[key], 0) / mine.length;
    return [{ name: c.name, x: X(mean("x")), y: Y(mean("y")), colour: seriesColour(i) }];
  });
  const labels = placeLabels(means, W);
  for (const { x, y, colour, text, name, left, line } of labels) {
    const right = left > x;
    const [side, anchor] = right ? [left, "start"] : [left + LETTER * text.length, "end"];
    nodes.push(
      h("line", { x1: x, y1: y, x2: side + (right ? -2 : 2), y2: line, stroke: colour }),
      h("circle", { cx: x, cy: y, r: 6.5, fill: colour, stroke: css("--panel"), "stroke-width": 2 }),
      h(
        "text",
        { x: side, y: line + 4, "text-anchor": anchor, class: "mark" },
        h("title", {}, name),
        text,
      ),
    );
  }
  nodes.push(h("text", { x: W - PAD.right, y: H - 6, "text-anchor": "end", class: "axis" }, "parameters"));
  nodes.push(h("text", { x: 4, y: 10, class: "axis" }, "test accuracy, %"));
  return h(
    "svg",
    { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "accuracy against parameters" },
    nodes,
  );
}

// A name beside its point, on the side that has room, moved down or up until it covers no other one.
export function placeLabels(means, W) {
  const placed = [];
  for (const mean of [...means].sort((a, b) => a.y - b.y)) {
    const text = shortened(mean.name, Math.max(Math.floor(W / 25), 16));
    const width = LETTER * text.length;
    const right = mean.x + 12 + width <= W;
    const left = right ? mean.x + 12 : Math.max(mean.x - 12 - width, 0);
    const taken = (y) =>
      placed.some(
        (other) =>
          Math.abs(other.line - y) < 15 &&
          left < other.left + LETTER * other.text.length + 6 &&
          other.left < left + width + 6,
      ) || means.some((m) => m !== mean && Math.abs(m.y - y) < 12 && m.x > left - 8 && m.x < left + width + 8);
    const shifts = [...Array(40).keys()].flatMap((k) => [5 * k, -5 * k]);
    const inside = (y) => y > PAD.top && y < H - PAD.bottom;
    const line = shifts.map((by) => mean.y + by).find((y) => inside(y) && !taken(y)) ?? mean.y;
    placed.push({ ...mean, text, left, line });
  }
  return placed;
}

const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

function spread(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = 0.08 * (high - low) || 0.5;
  return [low - pad, high + pad];
}

function axisY(y0, y1, Y, W) {
  const step = nice((y1 - y0) / 4);
  const nodes = [];
  for (let y = Math.ceil(y0 / step) * step; y <= y1; y += step) {
    nodes.push(h("line", { x1: PAD.left, x2: W - PAD.right, y1: Y(y), y2: Y(y), class: "grid" }));
    nodes.push(
      h(
        "text",
        { x: PAD.left - 6, y: Y(y) + 4, "text-anchor": "end", class: "axis" },
        fixed(y, step < 1 ? 1 : 0),
      ),
    );
  }
  return nodes;
}

function axisX(x0, x1, X, W) {
  const count = Math.round(W / 110);
  return [...Array(count).keys()].map((k) => {
    const x = Number(Math.exp(x0 + ((x1 - x0) * (k + 0.5)) / count).toPrecision(2));
    return h("text", { x: X(x), y: H - PAD.bottom + 16, "text-anchor": "middle", class: "axis" }, short(x));
  });
}

function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].find((m) => m * power >= step) * power;
}

// One row for each controller: its name, and under it the difference with its interval.
export function drawDifferences(differences, baseline, quantity) {
  const W = plotWidth();
  const losses = quantity === "test_loss"; // less is better, and it has no percent
  const [scale, unit] = losses ? [1, "of test loss"] : [100, "points of test accuracy"];
  const reach = Math.max(
    ...differences.map(({ mean, ci }) => scale * (Math.abs(mean) + (finite(ci) ? ci : 0))),
    0.0001 * scale,
  );
  const X = (points) => W / 2 + (points / reach) * (W / 2 - 12);
  const row = 40;
  const bottom = 4 + row * differences.length;
  const power = 10 ** Math.floor(Math.log10(reach));
  const last = [5, 2, 1].find((m) => m * power <= reach) * power;
  const ticks = [-last, 0, last];
  const nodes = ticks.flatMap((tick) => [
    h("line", { x1: X(tick), x2: X(tick), y1: 4, y2: bottom, class: tick ? "grid" : "zero" }),
    h(
      "text",
      { x: X(tick), y: bottom + 14, "text-anchor": "middle", class: "axis" },
      fixed(tick, last < 1 ? 2 : 0, true),
    ),
  ]);
  differences.forEach(({ controller, mean, ci }, i) => {
    const y = 30 + row * i;
    const clear = finite(ci) && Math.abs(mean) > ci;
    const colour = clear ? css(mean > 0 !== losses ? "--good" : "--bad") : css("--muted");
    const text = shortened(controller, Math.floor(W / LETTER) - 12);
    nodes.push(
      h("text", { x: 0, y: y - 12, class: "mark" }, h("title", {}, controller), text),
      h("line", {
        x1: X(scale * (mean - (ci || 0))),
        x2: X(scale * (mean + (ci || 0))),
        y1: y,
        y2: y,
        stroke: colour,
        "stroke-width": 2.5,
      }),
      h("circle", { cx: X(scale * mean), cy: y, r: 5, fill: colour }),
      h(
        "text",
        { x: W, y: y - 12, "text-anchor": "end", class: "axis" },
        losses ? fixed(mean, 3, true) : `${fixed(100 * mean, 2, true)} points`,
      ),
    );
  });
  nodes.push(
    h(
      "text",
      { x: W / 2, y: bottom + 30, "text-anchor": "middle", class: "axis" },
      shortened(`${unit} above ${baseline}`, Math.floor(W / 6)),
    ),
  );
  return h(
    "svg",
    {
      class: "plot",
      viewBox: `0 0 ${W} ${bottom + 36}`,
      role: "img",
      "aria-label": `differences from ${baseline} in ${unit}, with 95 % intervals`,
    },
    nodes,
  );
}

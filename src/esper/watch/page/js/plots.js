// Two pictures of results: accuracy against size, and differences with their intervals.

import { css, seriesColour } from "./colours.js";
import { h } from "./dom.js";
import { finite, fixed, short } from "./format.js";

const [W, H] = [560, 300];
const PAD = { left: 48, right: 16, top: 12, bottom: 34 };

export function drawFrontier(controllers) {
  const points = controllers.flatMap((c, i) =>
    c.parameters
      .map((x, m) => ({ i, x, y: 100 * c.test_accuracy[m] }))
      .filter(({ x, y }) => finite(x) && finite(y) && x > 0),
  );
  if (!points.length) return h("p", { class: "empty" }, "nothing was measured");
  const [xs, ys] = [points.map((p) => Math.log(p.x)), points.map((p) => p.y)];
  const [x0, x1] = spread(xs);
  const [y0, y1] = spread(ys);
  const X = (x) => PAD.left + ((Math.log(x) - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const Y = (y) => H - PAD.bottom - ((y - y0) / (y1 - y0)) * (H - PAD.top - PAD.bottom);
  const nodes = [...axisY(y0, y1, Y), ...axisX(x0, x1, X)];
  for (const { i, x, y } of points) {
    nodes.push(h("circle", { cx: X(x), cy: Y(y), r: 2.6, fill: seriesColour(i), opacity: 0.32 }));
  }
  controllers.forEach((c, i) => {
    const mine = points.filter((p) => p.i === i);
    if (!mine.length) return;
    const mean = (key) => mine.reduce((sum, p) => sum + p[key], 0) / mine.length;
    const [x, y] = [X(mean("x")), Y(mean("y"))];
    nodes.push(
      h("circle", { cx: x, cy: y, r: 6.5, fill: seriesColour(i), stroke: css("--panel"), "stroke-width": 2 }),
    );
    nodes.push(h("text", { x: x + 10, y: y + 4, class: "mark", fill: css("--ink") }, c.name));
  });
  nodes.push(h("text", { x: W - PAD.right, y: H - 4, "text-anchor": "end", class: "axis" }, "parameters"));
  nodes.push(h("text", { x: 4, y: 10, class: "axis" }, "test accuracy, %"));
  return h(
    "svg",
    { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "accuracy against parameters" },
    nodes,
  );
}

function spread(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = 0.08 * (high - low) || 0.5;
  return [low - pad, high + pad];
}

function axisY(y0, y1, Y) {
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

function axisX(x0, x1, X) {
  const count = 5;
  return [...Array(count).keys()].map((k) => {
    const x = Number(Math.exp(x0 + ((x1 - x0) * (k + 0.5)) / count).toPrecision(2));
    return h("text", { x: X(x), y: H - PAD.bottom + 16, "text-anchor": "middle", class: "axis" }, short(x));
  });
}

function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].find((m) => m * power >= step) * power;
}

export function drawDifferences(differences) {
  const reach = Math.max(
    ...differences.map(({ mean, ci }) => Math.abs(100 * mean) + (finite(ci) ? 100 * ci : 0)),
    0.01,
  );
  const X = (points) => 170 + ((points / reach + 1) / 2) * (W - 260);
  const row = 26;
  const high = 24 + row * differences.length;
  const nodes = [h("line", { x1: X(0), x2: X(0), y1: 8, y2: high - 16, class: "zero" })];
  differences.forEach(({ controller, mean, ci }, i) => {
    const y = 18 + row * i;
    const clear = finite(ci) && Math.abs(mean) > ci;
    const colour = clear ? css(mean > 0 ? "--good" : "--bad") : css("--muted");
    nodes.push(
      h("text", { x: 160, y: y + 4, "text-anchor": "end", class: "mark" }, controller),
      h("line", {
        x1: X(100 * (mean - (ci || 0))),
        x2: X(100 * (mean + (ci || 0))),
        y1: y,
        y2: y,
        stroke: colour,
        "stroke-width": 2.5,
      }),
      h("circle", { cx: X(100 * mean), cy: y, r: 5, fill: colour }),
      h(
        "text",
        { x: W - 4, y: y + 4, "text-anchor": "end", class: "axis" },
        `${fixed(100 * mean, 2, true)} points`,
      ),
    );
  });
  return h(
    "svg",
    { class: "plot", viewBox: `0 0 ${W} ${high}`, role: "img", "aria-label": "differences in test accuracy" },
    nodes,
  );
}

// A picture of results: differences with their intervals.

import { css } from "./colours.js";
import { h } from "./dom.js";
import { finite, fixed } from "./format.js";

const LETTER = 7.2; // average width of a bold letter of a name, in pixels

// Drawn at the size of the screen, so that words stay as large as elsewhere.
export const plotWidth = () => Math.min(document.documentElement.clientWidth - 76, 760);

const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

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
      "aria-label": `differences from ${baseline} in ${unit.replace(/^of /, "")}, with 95 % intervals`,
    },
    nodes,
  );
}

// The life of one member's slots, large: one lane per slot, ops as letters over the steps.

import { css, grownColour, inkOn, opColour, opGlyph, shaded, stageColour, stageLetter } from "./colours.js";

const LANE = 22;
const HEAD = 20;
const LEFT = 46;

export function drawStrip(canvas, trajectories, n, step) {
  const scale = Math.min(devicePixelRatio || 1, 2);
  const width = canvas.clientWidth;
  const height = HEAD + trajectories.S * LANE + 4;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const cell = (width - LEFT - 4) / trajectories.T;
  const edge = (t) => LEFT + t * cell;
  const colours = Object.fromEntries(
    Object.values(trajectories.stage_names).map((name) => [name, stageColour(name)]),
  );
  context.textBaseline = "middle";
  for (let s = 0; s < trajectories.S; s++) {
    const y = HEAD + s * LANE;
    context.globalAlpha = 1;
    context.fillStyle = css("--muted");
    context.font = `11px ${css("--font")}`;
    context.textAlign = "right";
    context.fillText(trajectories.slots[s], LEFT - 8, y + LANE / 2 - 1);
    for (let t = 0; t < trajectories.T; t++) {
      const name = trajectories.stageName(t, n, s);
      const alpha = trajectories.columns.alpha[(t * trajectories.N + n) * trajectories.S + s] / 255;
      context.globalAlpha = t <= step ? 1 : 0.22;
      const grown = name === "DORMANT" && trajectories.folded[(t * trajectories.N + n) * trajectories.S + s] > 0;
      context.fillStyle = grown ? grownColour() : shaded(name, colours[name] ?? "#888888", alpha);
      context.fillRect(edge(t), y, cell + 0.5, LANE - 3);
      const begins = t === 0 || name !== trajectories.stageName(t - 1, n, s);
      if (begins && cell >= 9 && name !== "DORMANT") {
        const colour = context.fillStyle;
        context.fillStyle = inkOn(colour);
        context.textAlign = "center";
        context.fillText(stageLetter(name), edge(t) + cell / 2, y + LANE / 2 - 1);
      }
    }
  }
  context.globalAlpha = 1;
  drawOps(context, trajectories, n, edge, cell);
  context.fillStyle = css("--ink");
  context.fillRect(edge(step + 1) - 1, HEAD - 4, 1.5, trajectories.S * LANE + 4);
}

function drawOps(context, trajectories, n, edge, cell) {
  context.textAlign = "center";
  context.font = `600 10px ${css("--font")}`;
  // Where letters would lie over each other, as on a phone, a stroke stands for each.
  const mark = (glyph, x) => (cell >= 8 ? context.fillText(glyph, x, 9) : context.fillRect(x - 1, 4, 2, 10));
  for (let t = 0; t < trajectories.T; t++) {
    const name = trajectories.op_names[trajectories.at("op", t, n)];
    const x = edge(t) + cell / 2;
    if (trajectories.at("rolled_back", t, n)) {
      context.fillStyle = css("--bad");
      mark("↺", x);
    } else if (name && opGlyph(name).trim()) {
      const well = trajectories.at("succeeded", t, n);
      context.fillStyle = opColour(name);
      context.globalAlpha = well ? 1 : 0.45;
      mark(opGlyph(name), x);
      if (!well && cell >= 8) context.fillRect(x - 5, 8.5, 10, 1);
      context.globalAlpha = 1;
    }
  }
}

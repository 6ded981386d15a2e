// Every member as a small film: steps from left to right, slots from top to bottom, the hue is the stage.
// Pixels are written row by row into one image, so that thousands of members are redrawn in a few milliseconds.

import { css, grownColour, pixel, stagePixels } from "./colours.js";
import { fixed, percent } from "./format.js";

const LABELLED = 15; // pixels of height from which on a film has room for words
const MARGIN = 4;

export class Wall {
  constructor(canvas, { onPick, onHover }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.frames = 0; // drawn so far
    this.canvas.addEventListener("click", (event) => onPick(this.hit(event)));
    this.canvas.addEventListener("mousemove", (event) => {
      const row = this.hit(event);
      if (row !== this.hovered) {
        this.hovered = row;
        this.outline();
      }
      onHover(row, event);
    });
    this.canvas.addEventListener("mouseleave", (event) => {
      this.hovered = null;
      this.outline();
      onHover(null, event);
    });
  }

  // order: rows of the trajectories, best first. step may lie between two steps.
  show(trajectories, order, step, selected) {
    const { clientWidth, clientHeight } = this.canvas;
    if (!trajectories || clientWidth < 20 || clientHeight < 20) return;
    const scale = Math.min(devicePixelRatio || 1, 2);
    const [width, height] = [Math.round(clientWidth * scale), Math.round(clientHeight * scale)];
    const theme = document.documentElement.dataset.theme;
    const key = [width, height, order.length, trajectories.T, trajectories.S, theme].join();
    if (key !== this.key || trajectories.stage_names !== this.names) {
      this.key = key;
      this.names = trajectories.stage_names;
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.table = stagePixels(trajectories.stage_names);
      this.dormant = trajectories.stageNumber("DORMANT");
      this.grown = pixel(grownColour());
      this.track = pixel(css("--future"));
      this.page = pixel(css("--panel"));
      this.layout = arrange(width, height, order.length, trajectories.T, trajectories.S, scale, 44);
    }
    Object.assign(this, { trajectories, order, step, selected, scale });
    this.draw();
  }

  draw() {
    const { layout, pixels, order } = this;
    pixels.fill(this.page);
    const row = new Uint32Array(layout.filmWidth);
    for (let i = 0; i < order.length; i++) this.film(order[i], i, row);
    this.context.putImageData(this.image, 0, 0);
    if (layout.label) this.labels();
    this.drawn = true;
    this.frames += 1;
    this.outline(true);
  }

  film(n, place, row) {
    const { layout, pixels, trajectories, table } = this;
    const { N, S, T } = trajectories;
    const [left, top] = this.corner(place);
    const now = Math.min(Math.max(this.step, 0), T - 1);
    const end = Math.round(((now + 1) / T) * layout.filmWidth);
    const { stage, alpha } = trajectories.columns;
    const { folded } = trajectories;
    for (let s = 0; s < S; s++) {
      const from = top + Math.floor((s * layout.filmHeight) / S);
      const to = Math.max(top + Math.floor(((s + 1) * layout.filmHeight) / S) - layout.rule, from + 1);
      let x = 0;
      for (let t = 0; t < T && x < end; t++) {
        const i = (t * N + n) * S + s;
        const next = Math.min(Math.round(((t + 1) * layout.filmWidth) / T), end);
        const grown = folded[i] && stage[i] === this.dormant;
        row.fill(grown ? this.grown : table[256 * stage[i] + alpha[i]], x, next);
        x = Math.max(next, x);
      }
      row.fill(this.track, x);
      for (let y = from; y < to; y++) pixels.set(row, y * layout.width + left);
    }
  }

  corner(place) {
    const { layout } = this;
    const column = Math.floor(place / layout.rows);
    const row = place % layout.rows;
    return [layout.left + column * layout.tileWidth + layout.label, layout.top + row * layout.tileHeight];
  }

  labels() {
    const { context, layout, trajectories, order, scale } = this;
    context.font = `${Math.round(11 * scale)}px ${css("--font")}`;
    context.textBaseline = "middle";
    order.forEach((n, place) => {
      const [left, top] = this.corner(place);
      const middle = top + layout.filmHeight / 2;
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(`${trajectories.columns.members[n]}`, left - 6 * scale, middle);
      const accuracy = trajectories.at("accuracy", Math.min(Math.floor(this.step), trajectories.T - 1) + 1, n);
      context.textAlign = "left";
      if (Number.isFinite(accuracy)) {
        context.fillText(fixed(100 * accuracy, 1), left + layout.filmWidth + 6 * scale, middle);
      }
    });
  }

  // The chosen film and the one under the mouse, over the picture as it was drawn last.
  outline(fresh = false) {
    if (!this.drawn || !this.order) return;
    if (!fresh) {
      this.context.putImageData(this.image, 0, 0);
      if (this.layout.label) this.labels();
    }
    for (const [n, colour, line] of [
      [this.hovered, css("--muted"), 1],
      [this.selected, css("--ink"), 2],
    ]) {
      const place = n === null || n === undefined ? -1 : this.order.indexOf(n);
      if (place < 0) continue;
      const [left, top] = this.corner(place);
      const pad = Math.max(this.layout.gap / 2, 1);
      this.context.strokeStyle = colour;
      this.context.lineWidth = line * this.scale;
      const [w, high] = [this.layout.filmWidth, this.layout.filmHeight];
      this.context.strokeRect(left - pad, top - pad, w + 2 * pad, high + 2 * pad);
    }
  }

  hit(event) {
    const { layout, scale } = this;
    if (!layout || !this.order) return null;
    const column = Math.floor((event.offsetX * scale - layout.left) / layout.tileWidth);
    const row = Math.floor((event.offsetY * scale - layout.top + layout.gap / 2) / layout.tileHeight);
    if (column < 0 || row < 0 || column >= layout.columns || row >= layout.rows) return null;
    return this.order[column * layout.rows + row] ?? null;
  }

  describe(n, step) {
    const { trajectories } = this;
    const t = Math.min(Math.floor(step), trajectories.T - 1);
    const slots = trajectories.slots.map((_, s) => trajectories.cell(t, n, s));
    return { title: trajectories.title(n), accuracy: percent(trajectories.at("accuracy", t + 1, n)), slots };
  }
}

// The number of columns that makes the smallest side of a cell as large as it can be.
export function arrange(width, height, count, T, S, scale, labelled = 44) {
  let best = null;
  const margin = MARGIN * scale;
  const [wide, high] = [width - 2 * margin, height - 2 * margin];
  for (let columns = 1; columns <= Math.min(count, Math.max(wide / 6, 1)); columns++) {
    const rows = Math.ceil(count / columns);
    const tileHeight = Math.floor(high / rows);
    const tileWidth = Math.floor(wide / columns);
    const gap = tileHeight >= 24 * scale ? 6 * scale : tileHeight >= 8 * scale ? 2 * scale : 1;
    const label =
      tileHeight - gap >= LABELLED * scale && tileWidth > 4.4 * labelled * scale ? labelled * scale : 0;
    const filmWidth = tileWidth - 3 * gap - label - (label && 44 * scale); // columns stand further apart than rows
    const filmHeight = Math.min(tileHeight - gap, 16 * S * scale);
    if (filmWidth < 2 || filmHeight < 1) continue;
    const score = Math.min(filmWidth / T, (1.4 * filmHeight) / S);
    if (!best || score > best.score)
      best = { score, columns, rows, gap, label, filmWidth, filmHeight, tileWidth };
  }
  best ??= { columns: 1, rows: count, gap: 0, label: 0, filmWidth: wide, filmHeight: 1, tileWidth: wide };
  const tileHeight = Math.max(Math.min(Math.floor(high / best.rows), best.filmHeight + best.gap), 1);
  return {
    ...best,
    tileHeight,
    width,
    left: margin,
    top: margin,
    rule: best.filmHeight / S >= 5 ? Math.round(scale) : 0,
  };
}

// Rows of the trajectories in the order and choice that the state asks for.
export function chosen(trajectories, sort, filter, step) {
  const rows = [...Array(trajectories.N).keys()].filter((n) => passes(trajectories, n, filter, step));
  const key = SORTS[sort]?.key ?? SORTS.return.key;
  const values = new Float64Array(trajectories.N);
  for (const n of rows) {
    const value = key(trajectories, n, step);
    values[n] = Number.isNaN(value) ? Infinity : value;
  }
  return rows.sort((a, b) => values[a] - values[b] || a - b);
}

export const SORTS = {
  return: { name: "return", key: (trajectories, n) => -trajectories.columns.returns[n] },
  accuracy: { name: "accuracy", key: (trajectories, n) => -trajectories.at("accuracy", trajectories.T, n) },
  gain: {
    name: "gain in accuracy",
    key: (trajectories, n) => trajectories.at("accuracy", 0, n) - trajectories.at("accuracy", trajectories.T, n),
  },
  parameters: { name: "parameters", key: (trajectories, n) => -trajectories.at("parameters", trajectories.T, n) },
  spent: { name: "compute", key: (trajectories, n) => -trajectories.at("spent", trajectories.T, n) },
  likeness: { name: "likeness", key: likeness },
  id: { name: "number", key: (trajectories, n) => trajectories.columns.members[n] },
};

// Members that planted the same things at the same time lie beside each other.
function likeness(trajectories, n) {
  let sum = 0;
  for (let s = 0; s < trajectories.S; s++) {
    let first = trajectories.T;
    for (let t = 0; t < trajectories.T && first === trajectories.T; t++) {
      if (trajectories.columns.blueprint[(t * trajectories.N + n) * trajectories.S + s] !== 255) first = t;
    }
    const last = trajectories.columns.stage[((trajectories.T - 1) * trajectories.N + n) * trajectories.S + s];
    sum = sum * 4096 + last * 256 + first;
  }
  return sum;
}

// "now:HOLDING" is the stage of some slot at the step, "ever:NORM" a blueprint that was planted,
// "op:PRUNE" an op that was asked for, "rolled back" and "refused" what they say, digits a member.
function passes(trajectories, n, filter, step) {
  const [kind, name] = filter.includes(":") ? filter.split(/:(.*)/) : [filter, ""];
  const { T, N, S } = trajectories;
  const some = (column, wanted) => {
    for (let t = 0; t < T; t++) if (wanted(trajectories.columns[column][t * N + n], t)) return true;
    return false;
  };
  const slot = (column, t, value) => {
    for (let s = 0; s < S; s++) if (trajectories.columns[column][(t * N + n) * S + s] === value) return true;
    return false;
  };
  const number = (names) => Number(Object.keys(names).find((value) => names[value] === name) ?? -1);
  if (kind === "now") return slot("stage", Math.min(Math.floor(step), T - 1), number(trajectories.stage_names));
  if (kind === "ever") {
    const value = number(trajectories.blueprint_names);
    for (let t = 0; t < T; t++) if (slot("blueprint", t, value)) return true;
    return false;
  }
  if (kind === "op") return some("op", (op) => op === number(trajectories.op_names));
  if (kind === "rolled back") return some("rolled_back", Boolean);
  if (kind === "refused") return some("succeeded", (well) => !well);
  if (/^\d+$/.test(kind)) return trajectories.columns.members[n] === Number(kind);
  return true;
}

// One member's network, block by block: the host's parts on a line, seeds over the joints between them.

import { stageColour } from "./colours.js";
import { h } from "./dom.js";
import { finite, fixed, short, words } from "./format.js";

const PART = 118; // width of a part
const JOINT = 46; // room for a joint between two parts
const SEED = { width: 142, height: 78, top: 12 };
const LINE = 190; // height of the line that the parts sit on
const GROWN = LINE + 80; // what a slot gave to the host is listed from here on
const ROW = 19;
const MOST_COPIES = 4; // that are drawn; the name says how many there are
const HALVES = { WIDEN_HALF: 1, WIDEN_FULL: 2 }; // of a block's first units that are added
const HEARD = new Set(["BLENDING", "HOLDING", "FOSSILIZED"]);

export function drawNetwork(trajectories, n, t) {
  const parts = trajectories.parts.length ? trajectories.parts : unnamed(trajectories.S);
  const pitch = Math.max(PART + JOINT, SEED.width + 10);
  const gap = pitch - PART;
  const width = 40 + parts.length * pitch;
  const grown = Math.max(...trajectories.slots.map((_, s) => trajectories.chain(t, n, s).length));
  const nodes = [h("line", { class: "wire", x1: 8, y1: LINE, x2: width - 8, y2: LINE })];
  parts.forEach((part, i) => {
    const x = 26 + i * pitch;
    nodes.push(drawPart(part, x, i < trajectories.S ? changed(part, trajectories.chain(t, n, i)) : { copies: 0 }));
    if (i < trajectories.S) nodes.push(drawSlot(trajectories, n, t, i, x + PART + gap / 2));
  });
  nodes.push(h("path", { class: "arrow", d: `M${width - 14} ${LINE - 5}l8 5l-8 5` }));
  return h(
    "svg",
    {
      class: "network",
      viewBox: `0 0 ${width} ${268 + ROW * grown}`,
      style: `min-width:${Math.round(width * 0.72)}px`,
      role: "img",
      "aria-label": `the network of ${trajectories.title(n)} at step ${t + 1}`,
    },
    nodes,
  );
}

function unnamed(S) {
  return [...Array(S + 1).keys()].map((i) => ({
    name: i < S ? `segment ${i + 1}` : "head",
    layers: [],
    parameters: NaN,
    shape: [],
  }));
}

// How often a block is there besides the first, and its hidden units now, by what its slot gave to the host.
function changed({ units }, chain) {
  const names = chain.map(({ blueprint }) => blueprint);
  const halves = names.reduce((sum, name) => sum + (HALVES[name] ?? 0), 0);
  const wider = units && halves ? units + halves * Math.max(1, Math.floor(units / 2)) : null;
  return { copies: names.filter((name) => name === "CLONE").length, wider };
}

// Taller parts are wider in the network's own sense: more channels or features. Copies lie behind their block.
function drawPart(part, x, { copies, wider }) {
  const lines = part.layers.map(abbreviated).filter(Boolean);
  const shown = lines.length > 4 ? [...lines.slice(0, 3), `+ ${lines.length - 3} more`] : lines;
  const channels = part.shape[0] ?? 1;
  const height = Math.min(Math.max(34 + 13 * shown.length, 30 + 8 * Math.log2(Math.max(channels, 1))), 100);
  const top = LINE - height / 2;
  return h(
    "g",
    { class: "part" },
    h("title", {}, [part.name, ...part.layers, `${part.parameters} parameters`].join("\n")),
    [...Array(Math.min(copies, MOST_COPIES)).keys()]
      .reverse()
      .map((k) =>
        h("rect", { class: "copy", x: x + 5 * (k + 1), y: top - 5 * (k + 1), width: PART, height, rx: 9 }),
      ),
    h("rect", { x, y: top, width: PART, height, rx: 9 }),
    h(
      "text",
      { x: x + PART / 2, y: top + 17, class: "name" },
      copies ? `${part.name} × ${copies + 1}` : part.name,
    ),
    shown.map((line, i) => h("text", { x: x + PART / 2, y: top + 31 + 13 * i, class: "layer" }, line)),
    wider
      ? h("text", { x: x + PART / 2, y: LINE + 58, class: "layer strong" }, `hidden ${part.units} → ${wider}`)
      : h("text", { x: x + PART / 2, y: LINE + 58, class: "size" }, part.shape.join(" × ")),
    h("text", { x: x + PART / 2, y: LINE + 71, class: "size" }, counted(part.parameters)),
  );
}

const counted = (parameters) => (finite(parameters) ? `${short(parameters)} parameters` : "");

// Conv1d(1, 8, kernel_size=(3,), stride=(1,)) → Conv1d 1→8
function abbreviated(layer) {
  const found = /^(\w+)\((.*)\)$/.exec(layer);
  if (!found) return layer.slice(0, 19);
  const named = /in_features=(\d+), out_features=(\d+)/.exec(found[2]) ?? /^(\d+), (\d+)/.exec(found[2]);
  const arrow = named && !/Norm/.test(found[1]) ? ` ${named[1]}→${named[2]}` : "";
  return `${found[1]}${arrow}`.slice(0, 19);
}

// A seed that is part of the host by now.
function drawGrown(seed, x, y) {
  const colour = stageColour("FOSSILIZED");
  return h(
    "g",
    { class: "grown" },
    h("title", {}, `${words(seed.blueprint)}: part of the host since step ${seed.step + 1}`),
    h("rect", {
      x: x - 48,
      y,
      width: 96,
      height: 15,
      rx: 7,
      fill: colour,
      "fill-opacity": 0.25,
      stroke: colour,
    }),
    h("text", { x, y: y + 11, class: "layer strong" }, words(seed.blueprint)),
  );
}

function drawSlot(trajectories, n, t, s, x) {
  const cell = trajectories.cell(t, n, s);
  const colour = stageColour(cell.stage);
  const name = h("text", { x, y: LINE + 22, class: "slot" }, trajectories.slots[s]);
  const tabs = trajectories.chain(t, n, s).map((seed, i) => drawGrown(seed, x, GROWN + ROW * i));
  if (!cell.blueprint) {
    return h(
      "g",
      { class: "slot-empty" },
      h("circle", { cx: x, cy: LINE, r: 7, fill: colour }),
      name,
      tabs,
      h("rect", { x: x - SEED.width / 2, y: SEED.top, width: SEED.width, height: SEED.height, rx: 10 }),
      h(
        "text",
        { x, y: SEED.top + SEED.height / 2 + 4, class: "quiet" },
        cell.stage === "DORMANT" ? "nothing grows here" : words(cell.stage),
      ),
    );
  }
  const heard = HEARD.has(cell.stage);
  const bottom = SEED.top + SEED.height;
  const branch = {
    class: "branch",
    stroke: colour,
    "stroke-width": 1.5 + 3 * cell.alpha,
    "stroke-dasharray": heard ? null : "3 4",
    opacity: heard ? 0.35 + 0.65 * cell.alpha : 0.7,
  };
  const points = cell.contribution;
  const removed = finite(points) ? `without it ${fixed(-points, 2, true)} points` : "not measured";
  const effect = `the score ${points < 0 ? "rises" : "falls"} by ${fixed(Math.abs(points), 2)} points if it is removed`;
  return h(
    "g",
    { class: "seed" },
    h(
      "title",
      {},
      `${trajectories.slots[s]}: ${cell.blueprint}, ${cell.stage}, alpha ${fixed(cell.alpha, 2)}; ` +
        (finite(points) ? effect : "its effect was not measured"),
    ),
    h("path", {
      ...branch,
      d: `M${x - 16} ${LINE}C${x - 16} ${LINE - 40} ${x - 34} ${LINE - 40} ${x - 34} ${bottom}`,
    }),
    h("path", {
      ...branch,
      d: `M${x + 34} ${bottom}C${x + 34} ${LINE - 40} ${x + 9} ${LINE - 50} ${x + 9} ${LINE - 8}`,
    }),
    h("circle", { cx: x + 9, cy: LINE, r: 8, class: "plus", stroke: colour }),
    h("path", { d: `M${x + 5} ${LINE}h8M${x + 9} ${LINE - 4}v8`, stroke: colour, class: "plus" }),
    h("rect", {
      x: x - SEED.width / 2,
      y: SEED.top,
      width: SEED.width,
      height: SEED.height,
      rx: 10,
      stroke: colour,
      fill: colour,
      "fill-opacity": 0.14 + 0.2 * cell.alpha,
      "stroke-width": 1.6,
    }),
    h("rect", {
      x: x - SEED.width / 2,
      y: bottom - 4,
      width: SEED.width * (heard ? cell.alpha : 0),
      height: 4,
      rx: 2,
      fill: colour,
    }),
    h("text", { x, y: SEED.top + 19, class: "name" }, words(cell.blueprint)),
    h(
      "text",
      { x, y: SEED.top + 35, class: "layer" },
      heard ? `${words(cell.stage)} · α ${fixed(cell.alpha, 2)}` : words(cell.stage),
    ),
    h("text", { x, y: SEED.top + 51, class: "layer strong" }, heard ? removed : ""),
    h("text", { x, y: SEED.top + 66, class: "layer" }, counted(cell.parameters)),
    name,
    tabs,
  );
}

// One palette for everything that is drawn; unknown names get a hue of the series. The hues are those of Okabe
// and Ito, which stay apart under the common kinds of colour blindness.

// Of each stage: its colour, the letter that stands for it where there is no colour, and what it means.
const STAGES = {
  UNKNOWN: ["#ffffff", "?", ""],
  DORMANT: ["#e9ecef", "·", "the slot is empty"],
  GERMINATED: ["#f0e442", "g", "a seed exists and rests"],
  TRAINING: ["#e69f00", "t", "trained in isolation; the host does not use it"],
  BLENDING: ["#56b4e9", "b", "the host uses it at strength alpha"],
  HOLDING: ["#0072b2", "h", "used in full, on probation"],
  FOSSILIZED: ["#009e73", "F", "part of the network for good"],
  PRUNED: ["#d55e00", "x", "removed"],
  EMBARGOED: ["#c3a3b5", "e", "the slot must rest"],
  RESETTING: ["#6e5c69", "r", "the slot is being cleared"],
};
const DORMANT_ON_DARK = "#2b3643"; // pale grey shines on a dark page

// Of each op: its colour, the letter that marks it on a time line, and what it does. WAIT leaves no mark.
const OPS = {
  WAIT: ["#cbd2d9", " ", ""],
  GERMINATE: ["#b8a800", "G", "plant a seed"],
  ADVANCE: ["#0072b2", "A", "on to the next stage"],
  SET_ALPHA_TARGET: ["#56b4e9", "α", "change the strength of a seed"],
  FOSSILIZE: ["#009e73", "F", "keep for good"],
  PRUNE: ["#d55e00", "P", "take out"],
};

// Anything else that needs telling apart (controllers, heads, blueprints): eight hues, then again dashed.
const SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4ea0", "#7b8794"];

const isDark = () => document.documentElement.dataset.theme === "dark";
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const hex = (parts) => `#${parts.map((p) => Math.round(p).toString(16).padStart(2, "0")).join("")}`;

// `share` of the first colour and the rest of the other.
export function mix(colour, other, share) {
  const [a, b] = [rgb(colour), rgb(other)];
  return hex(a.map((part, i) => share * part + (1 - share) * b[i]));
}

const brightness = (colour) => rgb(colour).reduce((sum, part, i) => sum + part * [0.3, 0.59, 0.11][i], 0);

const greyness = (colour) => {
  const parts = rgb(colour);
  return 1 - (Math.max(...parts) - Math.min(...parts)) / Math.max(...parts, 1);
};

// Pale, quiet colours would shine on a dark page: there they sink into it.
function onPage(colour) {
  if (!isDark()) return colour;
  if (greyness(colour) > 0.8) return mix(colour, css("--panel"), 0.1);
  return brightness(colour) < 110 ? mix(colour, "#ffffff", 0.78) : colour;
}

const hashed = (name) =>
  [...String(name)].reduce((sum, letter) => (31 * sum + letter.charCodeAt(0)) >>> 0, 7);

export function seriesColour(i) {
  const colour = SERIES[Math.max(i, 0) % SERIES.length];
  return isDark() && brightness(colour) < 140 ? mix(colour, "#ffffff", 0.78) : colour;
}

export const stageColour = (name) =>
  name === "DORMANT" && isDark() ? DORMANT_ON_DARK : (STAGES[name]?.[0] ?? seriesColour(hashed(name)));
export const stageLetter = (name) => STAGES[name]?.[1] ?? String(name)[0];
export const stageMeaning = (name) => STAGES[name]?.[2] ?? "";
export const inkOn = (colour) => (brightness(colour) < 128 ? "#ffffff" : "#17202b");
export const opColour = (name) => onPage(OPS[name]?.[0] ?? seriesColour(hashed(name)));
export const opGlyph = (name) => OPS[name]?.[1] ?? String(name)[0];
export const opMeaning = (name) => OPS[name]?.[2] ?? "";

// A colour for each stage and each strength, as pixels: [stage * 256 + alpha].
export function stagePixels(names) {
  const size = Math.max(...Object.keys(names).map(Number), 0) + 1;
  const pixels = new Uint32Array(256 * size).fill(pixel(css("--track")));
  for (const [value, name] of Object.entries(names)) {
    const colour = stageColour(name);
    for (let a = 0; a < 256; a++) {
      pixels[256 * value + a] = pixel(shaded(name, colour, a / 255));
    }
  }
  return pixels;
}

// A slot that is free again because its seed became part of the host.
export const grownColour = () => mix(stageColour("FOSSILIZED"), css("--panel"), 0.45);

// While a seed blends in, its shade is how much of it is heard.
export function shaded(name, colour, alpha) {
  return name === "BLENDING" ? mix(colour, css("--panel"), 0.28 + 0.72 * alpha) : colour;
}

export function pixel(colour) {
  const [r, g, b] = rgb(colour.startsWith("#") ? colour : "#888888");
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

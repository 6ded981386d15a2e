// One palette for everything, from the server; unknown names get a hue of the series.

let palette = {
  stages: {},
  stages_dark: {},
  stage_letters: {},
  stage_meanings: {},
  ops: {},
  op_glyphs: {},
  op_meanings: {},
  series: ["#009e73"],
};

export function setPalette(given) {
  palette = given;
}

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
  const colour = palette.series[Math.max(i, 0) % palette.series.length];
  return isDark() && brightness(colour) < 140 ? mix(colour, "#ffffff", 0.78) : colour;
}

export const stageColour = (name) =>
  (isDark() ? palette.stages_dark : palette.stages)[name] ?? seriesColour(hashed(name));
export const stageLetter = (name) => palette.stage_letters[name] ?? String(name)[0];
export const inkOn = (colour) => (brightness(colour) < 128 ? "#ffffff" : "#17202b");
export const opColour = (name) => onPage(palette.ops[name] ?? seriesColour(hashed(name)));
export const opGlyph = (name) => palette.op_glyphs[name] ?? String(name)[0];
export const stageMeaning = (name) => palette.stage_meanings[name] ?? "";
export const opMeaning = (name) => palette.op_meanings[name] ?? "";

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

// Numbers for people: few digits, units, and a dash for what was never measured.

const DASH = "–";

export const finite = (value) => typeof value === "number" && Number.isFinite(value);

// A number that was never measured is null, and null times anything would be 0.
export const times = (value, scale) => (finite(value) ? scale * value : NaN);

export function fixed(value, digits = 3, sign = false) {
  if (!finite(value)) return DASH;
  const text = Math.abs(value).toFixed(digits);
  const zero = Number(text) === 0;
  return (value < 0 && !zero ? "−" : sign && !zero ? "+" : "") + text;
}

// 1,234 or 12.3 k or 4.56 G: three digits that matter.
export function short(value) {
  if (!finite(value)) return DASH;
  const size = Math.abs(value);
  if (size < 10_000)
    return size < 100 && value % 1 ? value.toPrecision(3) : Math.round(value).toLocaleString("en");
  const units = ["k", "M", "G", "T", "P", "E"];
  let scaled = size;
  let unit = -1;
  while (scaled >= 999.5 && unit < units.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  return `${value < 0 ? "−" : ""}${scaled.toPrecision(3)}\u00a0${units[unit]}`;
}

export const percent = (value, digits = 1) => (finite(value) ? `${fixed(100 * value, digits)}\u00a0%` : DASH);

// Where nothing varies there is nothing to say of it.
export function interval(mean, half, form) {
  return finite(half) && half !== 0 ? `${form(mean)} ± ${form(half).replace(/^[+−]/, "")}` : form(mean);
}

export function duration(seconds) {
  if (!finite(seconds)) return DASH;
  const s = Math.max(Math.round(seconds), 0);
  if (s < 60) return `${s} s`;
  const [h, m] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  if (h >= 48) return `${Math.round(h / 24)} days`;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s % 60).padStart(2, "0")} s`;
}

// FOSSILIZED → fossilised, SET_ALPHA_TARGET → set alpha target
export const words = (name) =>
  String(name ?? "")
    .toLowerCase()
    .replaceAll("_", " ")
    .replace(/ize(d?)$/, "ise$1");

// What the page shows. It lives in the address, so that a link or a reload shows the same.

const LISTS = new Set(["runs"]);
const NUMBERS = new Set(["round", "step", "member"]);
const DEFAULTS = {
  view: "overview",
  runs: [], // laid over each other; the first is the baseline of differences
  focus: "", // the run whose members are shown; "" is the first
  round: null, // null follows the newest
  step: null, // null is the last step
  member: null,
  sort: "return",
  filter: "",
  theme: "", // "" as the system has it
};

export const state = { ...DEFAULTS };
const listeners = [];

export function onState(listener) {
  listeners.push(listener);
}

// Change some of it. Equal values change nothing, so that a listener may call this. While something moves,
// the address stays as it is: browsers allow only so many changes of it.
export function update(patch, moving = false) {
  const changed = Object.keys(patch).filter((key) => String(patch[key]) !== String(state[key]));
  if (!changed.length) return;
  Object.assign(state, patch);
  const address = encode();
  if (!moving && address !== location.hash) history.replaceState(null, "", address || "#");
  for (const listener of listeners) listener(changed);
}

export function settleAddress() {
  const address = encode();
  if (address !== location.hash) history.replaceState(null, "", address || "#");
}

export function focusRun() {
  return state.runs.includes(state.focus) ? state.focus : (state.runs[0] ?? "");
}

function encode() {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (LISTS.has(key)) for (const item of value) words.append(key, item);
    else if (value !== DEFAULTS[key] && value !== null) words.set(key, value);
  }
  const text = words.toString().replaceAll("%2F", "/");
  return text ? `#${text}` : "";
}

export function decode(hash = location.hash) {
  const words = new URLSearchParams(hash.slice(1));
  const found = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) {
    if (!words.has(key)) continue;
    const text = words.get(key);
    if (LISTS.has(key)) found[key] = words.getAll(key);
    else if (NUMBERS.has(key)) found[key] = /^\d{1,9}$/.test(text) ? Number(text) : null;
    else found[key] = text;
  }
  return found;
}

export function followAddress() {
  Object.assign(state, decode());
  addEventListener("hashchange", () => update(decode()));
}

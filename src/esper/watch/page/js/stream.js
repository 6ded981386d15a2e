// The one connection to the server: rounds as they are written. It comes back by itself and reads on.

import { runOf, setListed } from "./store.js";

let source = null;
let retry = null;
let wanted = [];
const listeners = [];

export function onData(listener) {
  listeners.push(listener);
}

const tell = (kind, name) => listeners.forEach((listener) => listener(kind, name));

// Follow these runs from where each was read up to.
export function follow(names) {
  if (source && String(names) === String(wanted) && source.readyState !== EventSource.CLOSED) return;
  wanted = [...names];
  connect();
}

function connect() {
  clearTimeout(retry);
  source?.close();
  const words = new URLSearchParams();
  for (const name of wanted) words.append("run", name);
  for (const name of wanted) words.append("at", runOf(name).at);
  source = new EventSource(`api/stream?${words}`);
  source.onopen = () => tell("link", "open");
  source.onerror = () => {
    tell("link", "lost");
    if (source.readyState === EventSource.CLOSED) retry = setTimeout(connect, 700);
  };
  source.addEventListener("rounds", ({ data }) => {
    const piece = JSON.parse(data);
    runOf(piece.run).add(piece);
    tell("rounds", piece.run);
  });
  source.addEventListener("runs", ({ data }) => {
    setListed(JSON.parse(data));
    tell("runs", "");
  });
  source.addEventListener("facts", ({ data }) => refresh(JSON.parse(data).run));
}

const asked = new Map();

// Facts are asked for one at a time; news that come meanwhile lead to one more question.
async function refresh(name) {
  if (asked.has(name)) {
    asked.set(name, true);
    return;
  }
  asked.set(name, false);
  try {
    runOf(name).facts = await getJson("api/facts", { run: name });
    tell("facts", name);
  } catch {
    tell("link", "lost");
  }
  const again = asked.get(name);
  asked.delete(name);
  if (again) refresh(name);
}

export async function getJson(path, words = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(words)) {
    for (const item of Array.isArray(value) ? value : [value]) query.append(key, item);
  }
  const answer = await fetch(`${path}?${query}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

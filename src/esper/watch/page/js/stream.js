// Where the data come from: the server, with rounds as they are written, or this file if it is a report.
// The connection to a server comes back by itself and reads on.

import { runOf, setListed } from "./store.js";

// A report holds the answers of the server by question: JSON, or gzip in base64 where it is long.
const embedded = document.getElementById("answers");
const answers = embedded && JSON.parse(embedded.textContent);
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
  if (answers) {
    names.forEach(readSaved);
    return;
  }
  if (source && String(names) === String(wanted) && source.readyState !== EventSource.CLOSED) return;
  wanted = [...names];
  connect();
}

async function readSaved(name) {
  const run = runOf(name);
  if (run.facts) return;
  run.facts = await getJson("api/facts");
  run.add(await getJson("api/rounds"));
  tell("rounds", name);
  tell("facts", name);
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

// The answer to a question, as a Response.
export async function ask(path, words = {}) {
  if (answers) return savedAnswer(words.round === undefined ? path : `${path} ${words.round}`);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(words)) {
    for (const item of Array.isArray(value) ? value : [value]) query.append(key, item);
  }
  return fetch(`${path}?${query}`);
}

function savedAnswer(question) {
  const answer = answers[question];
  if (answer === undefined) {
    const error = "this report does not hold it; 'esper watch' shows it";
    return new Response(JSON.stringify({ error }), { status: 404 });
  }
  if (typeof answer !== "string") return new Response(JSON.stringify(answer));
  const bytes = Uint8Array.from(atob(answer), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

export async function getJson(path, words = {}) {
  const answer = await ask(path, words);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

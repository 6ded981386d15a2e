// The slots and actions of every member in one round, from the bytes of its file.

import { ask } from "./stream.js";

const KINDS = { U8: Uint8Array, U16: Uint16Array, I16: Int16Array, I32: Int32Array, F32: Float32Array };
const MOST_BYTES = 96 * 1024 * 1024; // of rounds that stay in memory
const NO_BLUEPRINT = 255;
const UNMEASURED = -32768;

const cache = new Map(); // key → {trajectories} or {waiting}

// The trajectories of a round if they are here; else null, and `arrived` is called once they are.
export function trajectoriesOf(run, round, arrived) {
  if (!run?.facts?.trajectories.includes(round)) return null;
  const stem = `${run.name}\n${round}\n`;
  const key = stem + revision(run);
  const held = cache.get(key);
  if (held) {
    cache.delete(key);
    cache.set(key, held); // the latest used is the last to go
    return held.trajectories ?? null;
  }
  const before = [...cache].findLast(([other, { trajectories }]) => other.startsWith(stem) && trajectories);
  cache.set(key, { waiting: true });
  ask("api/trajectories", { run: run.name, round })
    .then(async (answer) => {
      if (!answer.ok) throw new Error((await answer.json()).error);
      const trajectories = parse(await answer.arrayBuffer(), fileOf(round));
      if (before) cache.delete(before[0]);
      run.unread.delete(round);
      keep(key, trajectories);
    })
    .catch((error) => {
      run.unread.set(round, `${run.name}: ${error.message}; round ${round} shows no members`);
      cache.set(key, { trajectories: null });
    })
    .finally(() => arrived());
  return before?.[1].trajectories ?? null;
}

// A growth writes its one file anew after every epoch; until that is here, the one before is shown.
function revision({ growth }) {
  return growth ? `${growth.curves[0]?.score.length} ${growth.finished}` : "";
}

// A run that goes back and on writes a round anew.
export function forgetTrajectories(name) {
  for (const key of cache.keys()) if (key.startsWith(`${name}\n`)) cache.delete(key);
}

function keep(key, trajectories) {
  cache.set(key, { trajectories });
  let bytes = 0;
  for (const [other, held] of [...cache].reverse()) {
    bytes += held.trajectories?.bytes ?? 0;
    if (bytes > MOST_BYTES && other !== key) cache.delete(other);
  }
}

const fileOf = (round) => `trajectories/${String(round).padStart(6, "0")}.safetensors`;

function parse(buffer, file) {
  try {
    return columnsOf(buffer);
  } catch {
    throw new Error(`${file} is damaged`); // whatever the bytes led to: no number, no JSON, too short
  }
}

function columnsOf(buffer) {
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const about = JSON.parse(header.__metadata__.trajectories);
  const columns = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const {
      dtype,
      data_offsets: [from, to],
    } = entry;
    const [Kind, start] = [KINDS[dtype], 8 + length + from];
    const size = (to - from) / Kind.BYTES_PER_ELEMENT;
    columns[name] =
      start % Kind.BYTES_PER_ELEMENT
        ? new Kind(buffer.slice(start, 8 + length + to))
        : new Kind(buffer, start, size);
  }
  const [T, N, S] = header.stage.shape;
  return new Trajectories(about, columns, { T, N, S }, buffer.byteLength);
}

class Trajectories {
  constructor(about, columns, { T, N, S }, bytes) {
    const { title: label, ...rest } = about;
    Object.assign(this, rest, { label, columns, T, N, S, bytes });
    this.blueprints = Object.keys(this.blueprint_names).length;
  }

  // What the whole of it is called.
  get name() {
    return this.label || (this.round ? `round ${this.round}` : "one episode");
  }

  title(n) {
    return `member ${this.columns.members[n]}`;
  }

  rowOf(member) {
    return this.columns.members.indexOf(member);
  }

  stageName(t, n, s) {
    return this.stage_names[this.columns.stage[(t * this.N + n) * this.S + s]] ?? "UNKNOWN";
  }

  // Everything about one slot at one step.
  cell(t, n, s) {
    const i = (t * this.N + n) * this.S + s;
    const blueprint = this.columns.blueprint[i];
    const points = this.columns.contribution[i];
    return {
      stage: this.stageName(t, n, s),
      alpha: this.columns.alpha[i] / 255,
      blueprint: blueprint === NO_BLUEPRINT ? null : (this.blueprint_names[blueprint] ?? `#${blueprint}`),
      contribution: points === UNMEASURED ? NaN : points / 100,
      parameters:
        blueprint === NO_BLUEPRINT
          ? 0
          : (this.columns.seed_parameters[s * this.blueprints + blueprint] ?? NaN),
    };
  }

  // How many seeds of each slot have become part of the host by each step: a fossil whose slot is free again.
  get folded() {
    if (this.counts) return this.counts;
    const { T, N, S } = this;
    const { stage, rolled_back } = this.columns;
    const fossil = this.stageNumber("FOSSILIZED");
    this.counts = new Uint8Array(T * N * S);
    for (let i = N * S; i < this.counts.length; i++) {
      const before = i - N * S;
      const left = stage[before] === fossil && stage[i] !== fossil;
      this.counts[i] = this.counts[before] + (left && !rolled_back[Math.floor(before / S)] ? 1 : 0);
    }
    return this.counts;
  }

  // The seeds that a slot gave to the host up to step t, the first first, as they were before.
  chain(t, n, s) {
    const place = (u) => (u * this.N + n) * this.S + s;
    const found = [];
    for (let u = 1; u <= t; u++) {
      if (this.folded[place(u)] > this.folded[place(u - 1)])
        found.push({ step: u, ...this.cell(u - 1, n, s) });
    }
    return found;
  }

  stageNumber(name) {
    return Number(Object.keys(this.stage_names).find((value) => this.stage_names[value] === name) ?? -1);
  }

  at(name, t, n) {
    return this.columns[name][t * this.N + n];
  }
}

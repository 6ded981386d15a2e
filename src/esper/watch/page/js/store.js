// The runs as the page knows them. Old rounds are thinned, so that a run of any length fits.

const MOST_ROUNDS = 4000; // of one run; beyond, every second one is forgotten
const MOST_BY_STEP = 300; // rounds whose ops are known step by step
const MOST_NOTES = 200;

export const runs = new Map(); // name → Run
export let listed = []; // [{name, state}], all that may be chosen

export function setListed(list) {
  listed = list;
  for (const { name, state } of list) if (runs.has(name)) runs.get(name).state = state;
}

export function runOf(name) {
  if (!runs.has(name)) runs.set(name, new Run(name));
  return runs.get(name);
}

export class Run {
  constructor(name) {
    this.name = name;
    this.state = listed.find((run) => run.name === name)?.state ?? "";
    this.facts = null;
    this.at = ""; // how far its rounds were read
    this.damaged = 0;
    this.unread = new Map(); // round → why its members cannot be shown
    this.forget();
  }

  forget() {
    this.rounds = []; // slim records, in order
    this.notes = []; // {round, text}: what should not happen
    this.version = (this.version ?? 0) + 1;
  }

  add(piece) {
    if (piece.restarted) {
      this.forget();
      this.damaged = 0;
    }
    this.at = piece.at;
    this.damaged += piece.damaged;
    for (const line of piece.lines) this.rounds.push(slim(line, this.notes));
    if (this.notes.length > MOST_NOTES) this.notes.splice(0, this.notes.length - MOST_NOTES);
    while (this.rounds.length > MOST_ROUNDS) {
      const last = this.rounds.length - 1;
      this.rounds = this.rounds.filter((_, i) => (last - i) % 2 === 0);
    }
    for (let i = this.rounds.length - 1 - MOST_BY_STEP; i >= 0 && this.rounds[i].byStep; i--) {
      this.rounds[i].byStep = null;
    }
    this.version += 1;
  }

  get last() {
    return this.rounds.at(-1) ?? null;
  }

  // What `esper.grow` wrote: there is one episode, and what is elsewhere a round is an epoch of it.
  get growth() {
    return this.facts?.growth ?? null;
  }

  // Whether a controller is trained in it; a folder that does not say so may be one.
  get trains() {
    return !["compare", "grow"].includes(this.facts?.kind);
  }

  get unit() {
    return this.growth ? "epoch" : "round";
  }

  // The record of a round, or of the nearest one before it.
  at_round(number) {
    if (number === null) return this.last;
    let [low, high] = [0, this.rounds.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rounds[middle].round <= number) low = middle + 1;
      else high = middle;
    }
    return this.rounds[Math.max(low - 1, 0)] ?? null;
  }

  // Rounds whose members can be shown.
  get shown() {
    return this.facts?.trajectories ?? [];
  }

  nearest(number) {
    const kept = this.shown;
    if (!kept.length) return null;
    if (number === null) return kept.at(-1);
    return kept.reduce((best, round) => (Math.abs(round - number) < Math.abs(best - number) ? round : best));
  }
}

function slim(line, notes) {
  const record = {};
  for (const [key, value] of Object.entries(line)) {
    if (typeof value === "number") record[key] = value;
  }
  record.ops = line.op_shares ?? {};
  record.heads = line.head_entropy ?? {};
  record.extra = line.extra ?? {};
  const rows = line.op_shares_by_step ?? [];
  record.byStep = rows.length ? rows.map((row) => Float32Array.from(row)) : null;
  for (const text of line.anomalies ?? []) notes.push({ round: line.round, text: String(text) });
  return record;
}

// Member-epochs per second in the rounds since the one before, and seconds to go at the latest pace.
export function pace(run, window = 12) {
  const last = run.last;
  if (!last) return { rate: NaN, left: NaN };
  const before = run.rounds[Math.max(run.rounds.length - 1 - window, 0)];
  const [time, rounds] = [last.seconds - before.seconds, last.round - before.round];
  if (!(time > 0 && rounds > 0)) return { rate: last.member_epochs / last.seconds, left: NaN };
  return {
    rate: (last.member_epochs - before.member_epochs) / time,
    left: (time / rounds) * Math.max(last.rounds - last.round, 0),
  };
}

// What is shown now: the runs, the round and the step, and the members at that moment.

import { lanesOf } from "./lanes.js";
import { focusRun, state } from "./state.js";
import { runOf } from "./store.js";

export function momentOf(arrived, between = null) {
  const runs = state.runs.map(runOf);
  const focus = focusRun() ? runOf(focusRun()) : null;
  const record = focus?.at_round(state.round) ?? null;
  const shown = focus?.nearest(state.round) ?? null;
  const lanes = lanesOf(focus, shown, arrived);
  const last = (lanes?.T ?? 1) - 1;
  const step = between ?? Math.min(state.step ?? last, last);
  return { runs, focus, record, shown, lanes, step, t: Math.floor(step), live: state.round === null };
}

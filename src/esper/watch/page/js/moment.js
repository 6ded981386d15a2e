// What is shown now: the runs, the round and the step, and the members at that moment.

import { trajectoriesOf } from "./trajectories.js";
import { focusRun, state } from "./state.js";
import { runOf } from "./store.js";

export function momentOf(arrived, between = null) {
  const runs = state.runs.map(runOf);
  const focus = focusRun() ? runOf(focusRun()) : null;
  const shown = focus?.nearest(state.round) ?? null;
  const trajectories = trajectoriesOf(focus, shown, arrived);
  const last = (trajectories?.T ?? 1) - 1;
  const step = between ?? Math.min(state.step ?? last, last);
  const t = Math.floor(step);
  const growing = Boolean(focus?.growth); // then the slider over steps is the one over epochs
  const number = growing ? state.step && t + 1 : state.round;
  const record = focus?.at_round(number) ?? null;
  const live = growing ? state.step === null : state.round === null;
  return { runs, focus, record, shown, trajectories, step, t, live };
}

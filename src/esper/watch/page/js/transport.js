// Replay: sliders over rounds and steps, and a clock that moves them.

import { fill, h } from "./dom.js";
import { settleAddress, state, update } from "./state.js";

const SPEEDS = [2, 6, 12, 30]; // steps per second
const ICONS = {
  play: "M5 3l9 5.5L5 14z",
  stop: "M4 3h3v11H4zM10 3h3v11h-3z",
  back: "M3 3h2v11H3zM14 3L6 8.5l8 5.5z",
  on: "M12 3h2v11h-2zM3 3l8 5.5L3 14z",
};
const icon = (d) =>
  h("svg", { viewBox: "0 0 17 17", width: 15, height: 15, "aria-hidden": "true" }, h("path", { d }));

export class Transport {
  // onFrame(step) is called for every picture while the clock runs; the step may lie between two.
  constructor(root, onFrame) {
    this.root = root;
    this.onFrame = onFrame;
    this.speed = 1;
    this.playing = false;
    this.moment = null;
    const button = (what, title, act) =>
      h("button", { class: "icon", title, "aria-label": title, onclick: act }, what);
    this.playButton = button(icon(ICONS.play), "play or stop (space)", () => this.toggle());
    this.speedButton = button("", "steps per second", () => this.faster());
    this.liveButton = h("button", {
      class: "live",
      title: "follow the newest round (l)",
      onclick: () => this.follow(),
    });
    this.round = h("input", { type: "range", id: "round", "aria-label": "round", min: 0, step: 1 });
    this.step = h("input", { type: "range", id: "step", "aria-label": "step", min: 0, step: 1 });
    this.marks = h("div", { class: "marks" });
    this.roundName = h("span");
    this.stepName = h("span");
    this.roundText = h("output", { for: "round" });
    this.stepText = h("output", { for: "step" });
    this.round.addEventListener("input", () => this.toRound(Number(this.round.value)));
    this.step.addEventListener("input", () => this.toStep(Number(this.step.value)));
    const track = h("div", { class: "track" }, this.round, this.marks);
    this.roundLabel = h("label", {}, this.roundName, track, this.roundText);
    fill(
      root,
      button(icon(ICONS.back), "round before (,)", () => this.nextRound(-1)),
      this.playButton,
      button(icon(ICONS.on), "round after (.)", () => this.nextRound(1)),
      this.speedButton,
      this.roundLabel,
      h("label", {}, this.stepName, h("div", { class: "track" }, this.step), this.stepText),
      this.liveButton,
    );
  }

  update(moment) {
    this.moment = moment;
    const { focus, trajectories, record, shown } = moment;
    const kept = focus?.shown ?? [];
    this.root.hidden = !focus?.rounds.length && !kept.length; // there is nothing to replay
    const newest = focus?.growth ? 0 : Math.max(focus?.last?.round ?? 0, kept.at(-1) ?? 0);
    const first = Math.min(focus?.rounds[0]?.round ?? Infinity, kept[0] ?? Infinity, newest);
    const at = focus?.growth ? shown : (record?.round ?? shown);
    Object.assign(this.round, { min: first, max: newest });
    this.round.value = state.round ?? newest;
    this.round.disabled = newest <= Number(this.round.min);
    const of = focus?.last?.rounds ?? newest;
    const elsewhere = shown !== null && at !== null && shown !== at ? ` · members of round ${shown}` : "";
    const named = trajectories?.label;
    this.roundText.textContent =
      named || at === null ? named || "–" : `${at} of ${Math.max(of, newest)}${elsewhere}`;
    this.roundName.textContent = trajectories?.label ? "controller" : "round";
    this.roundLabel.hidden = newest === 0; // of one episode there are steps alone
    this.stepName.textContent = focus?.growth ? "epoch" : "step";
    const span = Math.max(newest - this.round.min, 1);
    fill(
      this.marks,
      (focus?.facts?.trajectories ?? []).map((round) =>
        h("i", {
          style: `left:${(100 * (round - this.round.min)) / span}%`,
          title: `the members of round ${round}`,
        }),
      ),
    );
    this.step.max = (trajectories?.T ?? 1) - 1;
    this.step.value = moment.t;
    this.step.disabled = !trajectories;
    this.stepText.textContent = trajectories ? `${moment.t + 1} of ${trajectories.T}` : "–";
    fill(this.playButton, icon(this.playing ? ICONS.stop : ICONS.play));
    this.speedButton.textContent = `${SPEEDS[this.speed]}/s`;
    this.liveButton.classList.toggle("on", moment.live);
    fill(this.liveButton, h("i"), focus?.state === "running" ? "live" : "newest");
    this.liveButton.setAttribute("aria-pressed", String(moment.live));
  }

  toRound(round) {
    const newest = Number(this.round.max);
    update({ round: round >= newest ? null : round });
  }

  toStep(step) {
    const last = Number(this.step.max);
    update({ step: step >= last ? null : Math.max(step, 0) });
  }

  move(steps) {
    this.pause();
    this.toStep(Math.min(Math.max(this.moment.t + steps, 0), Number(this.step.max)));
  }

  // On to another round whose members are known, or by one where none are.
  nextRound(direction) {
    const kept = this.moment.focus?.shown ?? [];
    const now = this.moment.shown ?? this.moment.record?.round ?? 0;
    const next = direction > 0 ? kept.find((round) => round > now) : kept.findLast((round) => round < now);
    if (next !== undefined) this.toRound(next);
    return next !== undefined;
  }

  follow() {
    update({ round: null, step: null });
  }

  faster() {
    this.speed = (this.speed + 1) % SPEEDS.length;
    this.update(this.moment);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (!this.moment?.trajectories) return;
    const last = this.moment.trajectories.T - 1;
    this.playing = true;
    this.position = this.moment.t >= last ? -1 : this.moment.t;
    this.before = performance.now();
    requestAnimationFrame((now) => this.tick(now));
    this.update(this.moment);
  }

  tick(now) {
    if (!this.playing) return;
    const last = (this.moment.trajectories?.T ?? 1) - 1;
    if (this.moment.trajectories) this.position += ((now - this.before) / 1000) * SPEEDS[this.speed];
    this.before = now;
    if (this.position >= last) {
      if (!this.nextRound(1)) {
        update({ step: null });
        this.pause();
        return;
      }
      this.position = -1;
    }
    const step = Math.max(Math.floor(this.position), 0);
    if (step !== state.step) update({ step }, true);
    this.onFrame(Math.max(this.position, 0));
    requestAnimationFrame((then) => this.tick(then));
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    settleAddress();
    this.update(this.moment);
  }
}

// The page: what is shown follows the address and the stream, at most once per picture.

import { repaintCharts } from "./charts.js";
import { seriesColour } from "./colours.js";
import { makeCompare } from "./compare.js";
import { makeConfig } from "./config.js";
import { makeController } from "./controller.js";
import { fill, h } from "./dom.js";
import { makeEvents } from "./events.js";
import { listenToKeys, showKeys } from "./keys.js";
import { forgetTrajectories } from "./trajectories.js";
import { makeMembers } from "./members.js";
import { momentOf } from "./moment.js";
import { makeOverview } from "./overview.js";
import { focusRun, followAddress, onState, state, update } from "./state.js";
import { listed, runOf, runs, setListed } from "./store.js";
import { follow, getJson, onData } from "./stream.js";
import { Transport } from "./transport.js";

const VIEWS = {
  overview: makeOverview,
  controller: makeController,
  members: makeMembers,
  events: makeEvents,
  compare: makeCompare,
  settings: makeConfig,
};
const made = {};
const main = document.getElementById("main");
const page = { transport: null, link: "", queued: false, all: false };

function viewNow() {
  const name = state.view in VIEWS ? state.view : "overview";
  made[name] ??= VIEWS[name]();
  if (main.firstChild !== made[name].root) main.replaceChildren(made[name].root);
  return made[name];
}

// Whatever changed, the page is drawn once, with the next picture; another step alone moves less.
function redraw(all = true) {
  page.all ||= all;
  if (page.queued) return;
  page.queued = true;
  requestAnimationFrame(() => {
    const moment = momentOf(redraw);
    const view = viewNow();
    if (page.all || !view.step) {
      drawHeader(moment);
      view.update(moment);
    } else view.step(moment);
    page.transport.update(moment);
    page.queued = page.all = false;
    document.body.dataset.ready = String(Boolean(moment.focus?.facts));
  });
}

function drawHeader({ runs, focus }) {
  fill(
    document.querySelector(".views"),
    Object.keys(VIEWS).map((name, i) =>
      h(
        "button",
        {
          role: "tab",
          "aria-selected": String(name === state.view),
          title: `${name} (${i + 1})`,
          onclick: () => update({ view: name }),
        },
        name,
      ),
    ),
  );
  const chips = runs.map((run, i) =>
    h(
      "span",
      { class: `run ${run === focus ? "focus" : ""}`, style: `--hue:${seriesColour(i)}` },
      h(
        "button",
        {
          class: "name",
          title: "show the members of this run",
          onclick: () => update({ focus: run.name, member: null }),
        },
        h("i", { class: `dot ${run.state}`, title: run.state }),
        run.name,
      ),
      runs.length > 1 &&
        h(
          "button",
          { class: "off", "aria-label": `leave out ${run.name}`, onclick: () => leave(run.name) },
          "×",
        ),
    ),
  );
  const others = listed.filter(({ name }) => !state.runs.includes(name));
  const more =
    others.length > 0 &&
    h(
      "select",
      {
        "aria-label": "lay another run over these",
        onchange: (event) => update({ runs: [...state.runs, event.target.value] }),
      },
      h("option", { value: "" }, runs.length ? "+ run" : "choose a run"),
      others.map(({ name, state: how }) => h("option", { value: name }, `${name} (${how})`)),
    );
  const box = document.getElementById("runs");
  if (!box.contains(document.activeElement) || document.activeElement.tagName !== "SELECT")
    fill(box, chips, more);
  const link = document.getElementById("link");
  link.textContent = page.link === "lost" ? "reconnecting …" : "";
  link.dataset.link = page.link;
  document.title = focus ? `${focus.name} · Esper` : "Esper";
  fill(
    document.getElementById("notes"),
    problems(runs).map((text) => h("p", {}, text)),
  );
}

function problems(runs) {
  if (!listed.length) return ["There is no run here yet: one that is begun in the folder appears by itself."];
  return runs.flatMap((run) => [
    ...(run.facts?.problems ?? []).map((text) => `${run.name}: ${text}`),
    ...run.unread.values(),
    ...(run.damaged
      ? [`${run.name}: ${run.damaged} line${run.damaged > 1 ? "s" : ""} of metrics.jsonl could not be read`]
      : []),
  ]);
}

function forgetRun(name) {
  runs.delete(name);
  forgetTrajectories(name);
}

function leave(name) {
  update({ runs: state.runs.filter((other) => other !== name), member: null });
}

function setTheme(theme = state.theme) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = ["dark", "light"].includes(theme) ? theme : system;
}

function toggleTheme() {
  update({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" });
}

// Runs that the address names and that exist, or else the one that is running, or else the newest listed.
function chooseRuns() {
  const names = listed.map(({ name }) => name);
  const known = state.runs.filter((name) => names.includes(name));
  if (!known.length && listed.length) {
    known.push((listed.find((run) => run.state === "running") ?? listed[0]).name);
  }
  update({ runs: known });
}

async function begin() {
  followAddress();
  setTheme();
  setListed(await getJson("api/runs"));
  chooseRuns();
  page.transport = new Transport(document.getElementById("transport"), (step) =>
    made[state.view]?.frame?.(step),
  );
  onState((changed) => {
    if (changed.includes("theme")) {
      setTheme();
      repaintCharts();
    }
    if (changed.includes("runs") && !state.runs.length && listed.length) {
      chooseRuns(); // an address that names no run; this listener is called again
      return;
    }
    if (changed.includes("runs")) {
      for (const name of runs.keys()) if (!state.runs.includes(name)) forgetRun(name);
      follow(state.runs);
    }
    redraw(String(changed) !== "step");
  });
  onData((kind, name) => {
    if (kind === "link") page.link = name;
    if (kind === "runs" && !state.runs.length) chooseRuns();
    if (kind === "facts" && runOf(name).facts.trajectories.at(-1) < (runOf(name).newest ?? 0)) {
      forgetTrajectories(name);
      runOf(name).unread.clear();
    }
    if (kind === "facts") runOf(name).newest = runOf(name).facts.trajectories.at(-1) ?? 0;
    redraw();
  });
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.querySelector(".brand").addEventListener("click", (event) => {
    event.preventDefault();
    update({ view: "overview" });
  });
  addEventListener("resize", () => redraw());
  // On paper the page is light; charts are drawn with the colours of the theme.
  for (const [event, theme] of [
    ["beforeprint", "light"],
    ["afterprint", undefined],
  ])
    addEventListener(event, () => {
      setTheme(theme);
      repaintCharts();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setTheme();
    repaintCharts();
    redraw();
  });
  listenToKeys({
    views: Object.keys(VIEWS),
    transport: page.transport,
    theme: toggleTheme,
    walk: (by) => made.members?.walk(by),
    nextRun: () =>
      update({
        focus: state.runs[(state.runs.indexOf(focusRun()) + 1) % state.runs.length] ?? "",
        member: null,
      }),
  });
  follow(state.runs);
  redraw();
}

begin();

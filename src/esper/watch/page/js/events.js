// What happened in a round: events, what became of each blueprint, and what should not have happened.

import { stageColour } from "./colours.js";
import { fill, h, panel, swatch, table } from "./dom.js";
import { finite, fixed, short, words } from "./format.js";
import { getJson } from "./stream.js";
import { state, update } from "./state.js";

const SHOWN = 400;
const NO_EVENTS = "This run kept no events. Its members show what grew, and when.";

export function makeEvents() {
  const list = panel("Events", "", "events");
  const ledger = panel("What became of each blueprint", "in this round");
  const governor = panel("Governor and other interventions", "all rounds, the latest first");
  const root = h(
    "div",
    { class: "view eventful" },
    list.root,
    h("div", { class: "stack" }, ledger.root, governor.root),
  );
  const held = { key: "", found: null, kind: "" };
  const again = () => held.moment && draw();

  function draw() {
    const { found, moment } = held;
    const hint = state.member === null ? "" : ` of member ${state.member}`;
    // A comparison writes no events, whatever grew in it.
    const none = found?.total === 0 && !moment.focus.trains && !moment.focus.rounds.length;
    list.root.querySelector("h2").textContent = none ? "Events" : `Events of round ${held.round ?? "–"}${hint}`;
    ledger.root.hidden = governor.root.hidden = none;
    if (!found) {
      fill(list.body, h("p", { class: "empty" }, held.error ?? "…"));
      return;
    }
    fill(list.side, chips(found, held, again));
    const kept = found.events.filter((event) => !held.kind || event.kind === held.kind);
    const rest = found.total - found.events.length + Math.max(kept.length - SHOWN, 0);
    fill(
      list.body,
      kept.length ? rows(kept.slice(0, SHOWN)) : h("p", { class: "empty" }, none ? NO_EVENTS : "no events"),
      rest > 0 &&
        h(
          "p",
          { class: "hint" },
          `and ${rest.toLocaleString("en")} more; choose a member to see all of its events`,
        ),
      found.damaged > 0 && h("p", { class: "hint" }, `${found.damaged} lines of events.jsonl could not be read`),
    );
    fill(ledger.body, ledgerTable(found.ledger));
    fill(governor.body, notes(moment));
  }

  return {
    root,
    update(moment) {
      held.moment = moment;
      const { focus } = moment;
      const round = moment.record?.round ?? moment.shown ?? 0;
      const key = [focus?.name, round, state.member, focus?.facts?.trajectories?.at(-1), focus?.at].join("\n");
      if (key !== held.key && focus) {
        Object.assign(held, { key, round });
        const words_ = { run: focus.name, round };
        if (state.member !== null) words_.member = state.member;
        getJson("api/events", words_)
          .then((all) => held.key === key && Object.assign(held, { found: only(all, state.member), error: null }))
          .catch((error) => held.key === key && Object.assign(held, { found: null, error: error.message }))
          .finally(() => held.key === key && draw());
      }
      draw();
    },
  };
}

// A server sends the events of the member alone, a report has those of all.
function only(all, member) {
  const events = all.events.filter((event) => member === null || event.member === member);
  if (events.length === all.events.length) return all;
  const kinds = {};
  for (const { kind } of events) kinds[kind] = (kinds[kind] ?? 0) + 1;
  return { ...all, events, kinds, total: events.length };
}

function chips(found, held, again) {
  const chip = (kind, count) =>
    h(
      "button",
      {
        class: `chip ${held.kind === kind ? "on" : ""}`,
        "aria-pressed": String(held.kind === kind),
        onclick: () => {
          held.kind = held.kind === kind ? "" : kind;
          again();
        },
      },
      `${words(kind)} `,
      h("b", {}, count.toLocaleString("en")),
    );
  const all = Object.entries(found.kinds)
    .sort((a, b) => b[1] - a[1])
    .map(([kind, count]) => chip(kind, count));
  if (state.member !== null)
    all.push(h("button", { class: "chip", onclick: () => update({ member: null }) }, "all members"));
  return all;
}

function rows(events) {
  const cells = events.map((event) => [
    event.step + 1,
    h(
      "button",
      { class: "plain", onclick: () => update({ member: event.member, step: event.step, view: "members" }) },
      `${event.member}`,
    ),
    h("span", { class: `kind ${event.kind}` }, words(event.kind)),
    event.slot ?? "",
    words(event.blueprint),
    event.stage_to
      ? h("span", {}, swatch(stageColour(event.stage_to)), words(event.stage_to))
      : words(event.gate ?? event.rate),
    Object.entries(event.numbers ?? {})
      .filter(([, v]) => finite(v))
      .map(([name, v]) => `${words(name)} ${number(v)}`)
      .join(", "),
  ]);
  return table(["step", "member", "what", "slot", "blueprint", "to", "numbers"], cells, "events-table");
}

function number(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 0.1) return String(Number(value.toPrecision(2)));
  return size >= 1000 ? short(value) : fixed(value, value % 1 ? 2 : 0);
}

function ledgerTable(ledger) {
  if (!ledger.length) return h("p", { class: "empty" }, "nothing was planted");
  const cells = ledger.map((entry) => [
    words(entry.blueprint),
    entry.planted,
    bar(entry),
    finite(entry.contribution)
      ? `${fixed(entry.contribution, 2, true)}${finite(entry.contribution_ci) ? ` ± ${fixed(entry.contribution_ci, 2)}` : ""}`
      : "–",
    finite(entry.parameters) ? short(entry.parameters) : "–",
  ]);
  return table(
    ["blueprint", "planted", "kept · taken out · unfinished", "points when kept", "parameters"],
    cells,
  );
}

function bar(entry) {
  const fates = [
    ["kept", "FOSSILIZED"],
    ["taken out", "PRUNED"],
    ["unfinished", "EMBARGOED"],
  ];
  return h(
    "span",
    { class: "bar", title: fates.map(([name]) => `${name} ${entry[name]}`).join(", ") },
    fates.map(([name, stage]) => h("i", { style: `flex:${entry[name]};background:${stageColour(stage)}` })),
  );
}

function notes({ focus }) {
  const told = [...(focus?.notes ?? [])].reverse();
  if (!told.length) return h("p", { class: "empty" }, "none so far");
  return h(
    "ul",
    { class: "notes" },
    told
      .slice(0, 100)
      .map(({ round, text }) =>
        h(
          "li",
          {},
          h("button", { class: "plain", onclick: () => update({ round }) }, `round ${round}`),
          ` ${text}`,
        ),
      ),
  );
}

// Everything with the keyboard.

import { fill, h } from "./dom.js";
import { state, update } from "./state.js";

const KEYS = [
  ["1 … 6", "overview, controller, members, events, compare, settings"],
  ["space", "play or stop"],
  ["← →", "one step back or on"],
  [", .", "the round before or after whose members are kept"],
  ["l", "follow the newest round"],
  ["↑ ↓", "the member before or after, in the order shown"],
  ["PgUp PgDn Home End", "scroll; so do ↑ and ↓ where no members are shown"],
  ["/", "which members, or find a setting"],
  ["f", "put the next run into focus"],
  ["t", "dark or light"],
  ["Esc", "no member chosen"],
  ["?", "this list"],
];

export function showKeys() {
  const dialog = document.getElementById("keys");
  fill(
    dialog,
    h("h2", {}, "Keys"),
    h(
      "dl",
      {},
      KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]),
    ),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "close")),
  );
  if (!dialog.open) dialog.showModal();
}

// On a phone the whole page scrolls, elsewhere what lies between the bars: keys alone would not reach that.
function scroll(pages, pixels = 0) {
  const main = document.getElementById("main");
  const box = main.scrollHeight > main.clientHeight + 1 ? main : document.scrollingElement;
  box.scrollBy(0, pages * 0.9 * box.clientHeight + pixels);
}

export function listenToKeys({ views, transport, theme, walk, nextRun }) {
  const acts = {
    " ": () => transport.toggle(),
    ArrowLeft: () => transport.move(-1),
    ArrowRight: () => transport.move(1),
    ",": () => transport.nextRound(-1),
    ".": () => transport.nextRound(1),
    ArrowUp: () => (state.view === "members" ? walk(-1) : scroll(0, -60)),
    ArrowDown: () => (state.view === "members" ? walk(1) : scroll(0, 60)),
    PageUp: () => scroll(-1),
    PageDown: () => scroll(1),
    Home: () => scroll(0, -1e7),
    End: () => scroll(0, 1e7),
    l: () => transport.follow(),
    f: nextRun,
    t: theme,
    "/": () => document.querySelector("#main select#filter, #main #search")?.focus(),
    "?": showKeys,
    Escape: () => update({ member: null }),
  };
  views.forEach((view, i) => (acts[i + 1] = () => update({ view })));
  addEventListener("keydown", (event) => {
    const writing = event.target.closest?.("input, select, textarea, dialog");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (writing) {
      if (event.key === "Escape" && event.target.tagName !== "DIALOG") event.target.blur();
      return;
    }
    const act = acts[event.key];
    if (!act) return;
    if (event.key === " " && event.target.tagName === "BUTTON") return;
    event.preventDefault();
    act();
  });
}

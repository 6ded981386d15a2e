// What came of a run, in sentences: the verdict, remarks, and what grew.

import { fill, h, panel } from "./dom.js";

export function makeOutcome() {
  const { root, body } = panel("What came out", "", "verdict");
  let drawn = null;
  return {
    root,
    update(focus) {
      const outcome = focus?.facts?.outcome;
      root.hidden = !outcome?.sentences.length;
      if (outcome === drawn) return;
      drawn = outcome;
      const [first, ...rest] = outcome?.sentences ?? [];
      fill(
        body,
        h("p", { class: "first" }, first),
        rest.length > 0 && list(rest),
        outcome?.grew.length > 0 && [h("h3", {}, "What grew"), list(outcome.grew)],
        outcome?.story && h("details", {}, h("summary", {}, "Epoch by epoch"), h("pre", {}, outcome.story)),
      );
    },
  };
}

const list = (sentences) =>
  h(
    "ul",
    {},
    sentences.map((sentence) => h("li", {}, sentence)),
  );

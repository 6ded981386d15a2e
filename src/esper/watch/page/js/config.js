// Settings beside each other: what differs first.

import { seriesColour } from "./colours.js";
import { fill, h, panel, swatch } from "./dom.js";
import { words } from "./format.js";

export function makeConfig() {
  const { root: box, body, side } = panel("Settings", "");
  const made = h("div", { class: "made" });
  const root = h("div", { class: "view settings" }, box, made);
  const search = h("input", {
    type: "search",
    placeholder: "find a setting",
    id: "search",
    "aria-label": "find a setting",
  });
  const all = h("input", { type: "checkbox", id: "all-settings" });
  const choice = h("label", { class: "check" }, all, "also what is equal");
  side.append(choice, search);
  const held = { moment: null };
  const draw = () => held.moment && drawSettings(held.moment, body, search.value, all.checked, choice);
  search.addEventListener("input", draw);
  all.addEventListener("change", draw);
  return {
    root,
    update(moment) {
      held.moment = moment;
      draw();
      fill(made, moment.runs.map(origin));
    },
  };
}

const shown = (value) =>
  value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);

function drawSettings({ runs }, body, sought, everything, choice) {
  const known = runs.filter((run) => run.facts);
  const names = [...new Set(known.flatMap((run) => Object.keys(run.facts.config)))];
  const several = known.length > 1;
  choice.hidden = !several;
  const rows = names
    .map((name) => {
      const values = known.map((run) => shown(run.facts.config[name]));
      return { name, values, differs: new Set(values).size > 1 };
    })
    .filter(
      ({ name, values, differs }) =>
        (differs || !several || everything) &&
        `${name} ${values.join(" ")}`.toLowerCase().includes(sought.toLowerCase()),
    );
  const head = h(
    "tr",
    {},
    h("th", {}, "setting"),
    known.map((run) => h("th", {}, swatch(seriesColour(runs.indexOf(run))), run.name)),
  );
  fill(
    body,
    rows.length
      ? h(
          "div",
          { class: "wide" },
          h(
            "table",
            { class: "settings-table" },
            h("thead", {}, head),
            h(
              "tbody",
              {},
              rows.map(({ name, values, differs }) =>
                h(
                  "tr",
                  { class: differs && several ? "differs" : "" },
                  h("td", {}, h("code", {}, name)),
                  values.map((value) => h("td", {}, value)),
                ),
              ),
            ),
          ),
        )
      : h(
          "p",
          { class: "empty" },
          several && !sought ? "these runs have the same settings" : "no such setting",
        ),
  );
}

function origin(run) {
  if (!run.facts) return null;
  const { root, body } = panel(run.name, `${words(run.facts.kind)} · seed ${run.facts.about.seed ?? "–"}`);
  body.append(h("pre", {}, run.facts.command ?? ""));
  const versions = Object.entries(run.facts.about.versions ?? {}).map(
    ([name, version]) => `${name} ${version}`,
  );
  body.append(h("p", { class: "hint" }, versions.join(" · ")));
  if (run.facts.network)
    body.append(h("details", {}, h("summary", {}, "the saved network"), h("pre", {}, run.facts.network)));
  return root;
}

// Elements without markup in strings: whatever a run folder says is text and stays text.

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "g", "path", "rect", "circle", "line", "text", "tspan", "title", "polyline"]);

export function h(tag, attributes = {}, ...children) {
  const node = IN_SVG.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(
    ...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(
    ...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

// A card with a heading, a line of help, and a place on the right of the heading.
export function panel(title, hint = "", classes = "") {
  const side = h("div", { class: "side" });
  const body = h("div", { class: "body" });
  const root = h(
    "section",
    { class: `panel ${classes}`, "aria-label": title },
    h("header", {}, h("h2", {}, title), hint && h("span", { class: "hint" }, hint), side),
    body,
  );
  return { root, body, side };
}

export function table(titles, rows, classes = "") {
  const cell = (value) => (value instanceof Node ? value : String(value ?? ""));
  return h(
    "div",
    { class: "wide" },
    h(
      "table",
      { class: classes },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title) => h("th", {}, cell(title))),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((value, i) => h("td", { "data-title": titles[i] instanceof Node ? null : titles[i] }, cell(value))),
          ),
        ),
      ),
    ),
  );
}

// A patch of colour, with a letter on it where the colour alone may not be told apart.
export function swatch(colour, letter = "", ink = "inherit") {
  const style = `background:${colour};color:${ink}`;
  return h("i", { class: letter ? "swatch lettered" : "swatch", style }, letter);
}

// Curves over rounds or steps, with intervals, for one run or several. A thin layer over uPlot.

import { css, mix } from "./colours.js";
import { h, panel, swatch } from "./dom.js";
import { finite } from "./format.js";

/* global uPlot */
const drawn = new Set();
const noLabel = () => "";

// One chart in a card. `update({x, lines, mark, marks})` gives it numbers:
//   x [n]; lines [{name, colour, y [n], low?, high?, dash?, fill?, show?, spoken?}], where spoken(i) is the text
//   of a value; mark: x of the moment that is shown; marks [{x, y, text}] are written over the lines
export class Chart {
  constructor(
    title,
    {
      hint = "",
      form = String,
      tick = form,
      height = 180,
      filling = false,
      range,
      sync,
      xName = "round",
      yName = title.toLowerCase(),
      onPick,
      classes = "",
    },
  ) {
    const { root, body, side } = panel(title, hint, `chart ${classes}`);
    Object.assign(this, { root, body, side, form, tick, least: height, filling, range, sync, onPick });
    Object.assign(this, { title, xName, yName });
    body.style.minHeight = `${height}px`;
    body.classList.toggle("filling", filling);
    this.empty = h("p", { class: "empty" }, "nothing yet");
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(body);
    drawn.add(this);
  }

  update({ x, lines, mark = null, marks = [], stacked = false }) {
    this.lines = lines;
    this.mark = mark;
    this.marks = marks;
    this.stacked = stacked;
    this.has = x.length > 0 && lines.length > 0;
    if (!this.has) {
      this.plot?.destroy();
      this.plot = null;
      this.body.replaceChildren(this.empty);
      this.side.replaceChildren();
      return;
    }
    this.data = [x, ...lines.flatMap((line) => (line.low ? [line.y, line.high, line.low] : [line.y]))];
    const shape = lines
      .map((line) => [line.name, line.colour, Boolean(line.low), line.dash].join())
      .join(";");
    const key = [shape, this.xName, document.documentElement.dataset.theme].join();
    if (!this.plot || key !== this.shape) {
      this.shape = key;
      this.build();
    } else this.plot.setData(this.data);
    this.readout(this.plot?.cursor.idx ?? null);
  }

  build() {
    this.plot?.destroy();
    this.body.replaceChildren();
    this.plot = new uPlot(this.options(), this.data, this.body);
    this.plot.root.setAttribute("role", "img");
  }

  options() {
    const series = [{}];
    const bands = [];
    for (const line of this.lines) {
      const index = series.length;
      series.push({
        stroke: line.colour,
        width: line.width ?? 1.8,
        dash: line.dash,
        spanGaps: true,
        fill: line.fill,
        points: { show: (plot) => plot.data[0].length < 3, size: 5 },
      });
      if (line.low) {
        const quiet = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push(quiet, quiet);
        bands.push({ series: [index + 1, index + 2], fill: `${line.colour}26` });
      } else if (line.over !== undefined) {
        bands.push({ series: [index, line.over + 1], fill: line.band });
      }
    }
    const axis = {
      stroke: css("--muted"),
      grid: { stroke: css("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${css("--font")}`,
      labelFont: `11px ${css("--font")}`,
      labelSize: 15,
      labelGap: 0,
    };
    return {
      ...this.size(),
      series,
      bands,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { x: false, y: false },
        sync: this.sync ? { key: this.sync } : undefined,
      },
      scales: { x: { time: false, range: wide }, y: { range: this.range ?? padded } },
      axes: [
        {
          ...axis,
          label: this.xName,
          size: 26,
          values: (_, ticks) => ticks.map((tick) => (tick % 1 ? noLabel() : this.xForm(tick))),
        },
        { ...axis, label: this.yName, size: 48, values: (_, ticks) => distinct(ticks.map(this.tick)) },
      ],
      hooks: {
        draw: [(plot) => this.drawMark(plot), (plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.readout(plot.cursor.idx ?? null)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.pick(plot))],
      },
    };
  }

  xForm(value) {
    return value.toLocaleString("en");
  }

  pick(plot) {
    const x = plot.data[0][plot.cursor.idx];
    if (finite(x)) this.onPick?.(x);
  }

  drawMark(plot) {
    if (this.mark === null || this.mark === undefined) return;
    const x = Math.round(plot.valToPos(this.mark, "x", true));
    const { ctx: context, bbox } = plot;
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    context.save();
    context.strokeStyle = css("--accent");
    context.lineWidth = devicePixelRatio;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(x, bbox.top);
    context.lineTo(x, bbox.top + bbox.height);
    context.stroke();
    context.restore();
  }

  drawMarks(plot) {
    if (!this.marks?.length) return;
    const { ctx: context, bbox } = plot;
    context.save();
    context.font = `600 ${11 * devicePixelRatio}px ${css("--font")}`;
    context.fillStyle = css("--ink");
    context.textAlign = "center";
    context.textBaseline = "bottom";
    for (const { x, y, text } of this.marks) {
      if (!finite(y)) continue;
      const high = plot.valToPos(y, "y", true) - 4 * devicePixelRatio;
      context.fillText(text, plot.valToPos(x, "x", true), Math.max(high, bbox.top + 12 * devicePixelRatio));
    }
    context.restore();
  }

  // The names of the lines, with their values under the cursor or at the moment that is shown.
  readout(index) {
    if (!this.has) return;
    const x = this.data[0];
    let at = index;
    if (at === null) {
      at = x.length - 1;
      if (this.mark !== null) while (at > 0 && x[at] > this.mark) at--;
    }
    const spoken = this.lines.filter((line) => line.name && line.show !== false);
    const order = this.stacked ? [...spoken].reverse() : spoken;
    const names = spoken.map((line) => line.name).join(", ");
    this.plot.root.setAttribute(
      "aria-label",
      `${this.title}: ${this.yName} over ${this.xName}${names && ` of ${names}`}`,
    );
    this.side.replaceChildren(
      h("span", { class: "when" }, `${this.xName} ${this.xForm(x[at])}`),
      ...order.map((line) => {
        const y = line.told ?? line.y;
        let known = at;
        while (index === null && known > 0 && !finite(y[known])) known--; // a shorter run: its last round
        const value = y[known];
        const half = line.high && finite(value) ? line.high[known] - value : NaN;
        const plain = finite(half) ? `${this.form(value)} ± ${this.form(half)}` : this.form(value);
        const text = line.spoken?.(known) ?? plain;
        return h("span", { class: "value" }, swatch(line.colour), h("em", {}, line.name), h("b", {}, text));
      }),
    );
  }

  size() {
    const [width, height] = [
      this.body.clientWidth - 14,
      this.filling ? this.body.clientHeight - 4 : this.least,
    ];
    return { width: Math.max(width, 50), height: Math.max(height, 60) };
  }

  resize() {
    const { width, height } = this.size();
    const same = this.plot && width === this.plot.width && height === this.plot.height;
    if (this.plot && width > 50 && !same) this.plot.setSize({ width, height });
  }
}

export function repaintCharts() {
  for (const chart of drawn) if (chart.has && chart.root.isConnected) chart.build();
}

// A flat line has ticks that differ by less than is written: each text stands once.
const distinct = (texts) => texts.map((text, i) => (text === texts[i - 1] ? noLabel() : text));

function wide(plot, low, high) {
  return low === high ? [low - 1, high + 1] : [low, high];
}

// Room above and below, and no line that is stretched to fill the picture by noise alone.
function padded(plot, low, high) {
  if (!finite(low) || !finite(high)) return [0, 1];
  const span = Math.max(high - low, 1e-3 * Math.max(Math.abs(high), Math.abs(low)), 1e-9);
  return [low - 0.08 * span, high + 0.08 * span];
}

export const shares = () => [0, 1];

// The rounds of several runs on one axis; where a run has no such round there is a gap.
export function aligned(runs, pick) {
  const x = [...new Set(runs.flatMap((run) => run.rounds.map((record) => record.round)))].sort(
    (a, b) => a - b,
  );
  const place = new Map(x.map((round, i) => [round, i]));
  const columns = runs.map((run) => {
    const found = { y: blank(x), low: blank(x), high: blank(x), sure: false };
    for (const record of run.rounds) {
      const i = place.get(record.round);
      const [mean, half] = pick(record);
      if (!finite(mean)) continue;
      found.y[i] = mean;
      found.low[i] = finite(half) ? mean - half : mean;
      found.high[i] = finite(half) ? mean + half : mean;
      found.sure ||= finite(half);
    }
    return found;
  });
  return { x, columns };
}

// Lines with an x each on one axis; where a line has no such x there is a gap.
export function onOneAxis(lines) {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, i) => [value, i]));
  const found = lines.map((line) => {
    const y = blank(x);
    line.x.forEach((value, i) => (y[place.get(value)] = line.y[i]));
    return { ...line, y };
  });
  return { x, lines: found };
}

const blank = (x) => new Array(x.length).fill(null);

// Shares that add up, as areas upon each other.
export function stacked(x, parts) {
  let below = new Array(x.length).fill(0);
  return parts.map(({ name, colour, y }, i) => {
    const top = below.map((base, k) => base + (y[k] ?? 0));
    below = top;
    const fill = mix(colour, css("--panel"), 0.82);
    return i
      ? { name, colour, y: top, told: y, width: 0.5, over: i - 1, band: fill }
      : { name, colour, y: top, told: y, width: 0.5, fill };
  });
}

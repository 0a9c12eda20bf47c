// Time series as lines or stacked bars in plain SVG. The values under the pointer, or those that the arrow keys have
// chosen, are shown below the chart. Screen readers read them out as the values of a slider.

import { h, keyed, setAttribute, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 150;
const LEFT = 52; // room for the labels of the values
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 22; // room for the times
const BASELINE = HEIGHT - BOTTOM;
const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -12, PageUp: 12, Home: -Infinity, End: Infinity };

export class Chart {
  /** `format` turns a value into text, and `unit` is shown next to the title. With `stacked`, draws stacked bars instead of lines. */
  constructor({ title, unit, format, stacked = false }) {
    Object.assign(this, { title, format, stacked });
    this.data = null;
    this.chosenS = null; // the time that is read out; null for the latest
    this.when = h("span", { class: "at" });
    this.values = h("ul", { class: "values" });
    this.grid = svg("g", { class: "grid" });
    this.marks = svg("g");
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: BASELINE, visibility: "hidden" });
    this.nothing = svg("text", { class: "nothing", "text-anchor": "middle", y: HEIGHT / 2 });
    this.plot = svg("svg", { class: "plot", height: HEIGHT, role: "slider", tabindex: 0, "aria-label": `${title}, ${unit}`, "aria-valuemin": 0 }, this.grid, this.marks, this.cursor, this.nothing);
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, h("h4", {}, title), h("span", { class: "count" }, unit), this.when), this.plot, this.values);
    this.plot.addEventListener("pointermove", (event) => this.choose(this.indexAt(event)));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("blur", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  /** Draws `series` of {name, tone, values}; a value that is not known is null. `empty` is shown if there are no values. */
  draw({ startS, bucketS, series, empty }) {
    this.data = { startS, bucketS, series, empty, count: series[0].values.length };
    this.render();
  }

  get chosen() {
    const { startS, bucketS, count } = this.data;
    return this.chosenS === null ? null : Math.min(count - 1, Math.max(0, Math.round((this.chosenS - startS) / bucketS)));
  }

  choose(index) {
    if (this.data === null) return;
    this.chosenS = index === null ? null : this.data.startS + index * this.data.bucketS;
    this.read();
  }

  step(event) {
    if (!(event.key in STEPS) || this.data === null) return;
    const last = this.data.count - 1;
    this.choose(Math.min(last, Math.max(0, (this.chosen ?? last) + STEPS[event.key])));
    event.preventDefault();
  }

  indexAt(event) {
    const { left, width } = this.plot.getBoundingClientRect();
    const share = (event.clientX - left - LEFT) / (width - LEFT - RIGHT);
    return this.data === null ? null : Math.min(this.data.count - 1, Math.max(0, Math.floor(share * this.data.count)));
  }

  render() {
    if (this.data === null || !this.plot.clientWidth) return;
    const { series, count, bucketS, empty } = this.data;
    const width = this.plot.clientWidth;
    const nothing = !series.some(({ values }) => values.some(Boolean));
    const top = nothing ? 0 : ceiling(this.highest());
    this.x = (index) => LEFT + ((width - LEFT - RIGHT) * index) / count;
    const y = (value) => BASELINE - ((BASELINE - TOP) * value) / (top || 1);
    setAttribute(this.plot, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setText(this.nothing, nothing ? empty : "");
    setAttribute(this.nothing, "x", (LEFT + width - RIGHT) / 2);
    this.labels(nothing ? [0] : [0, top / 2, top], y, width, (count * bucketS) / 60);
    const paths = nothing ? [] : this.stacked ? bars(series, this.x, y) : series.map((entry) => ({ ...entry, d: line(entry.values, this.x, y) }));
    keyed(this.marks, paths, (path) => path.name, () => svg("path"), (node, path) => {
      setAttribute(node, "class", `${this.stacked ? "bars" : "curve"} tone-${path.tone}`);
      setAttribute(node, "d", path.d);
    });
    this.read();
  }

  highest() {
    const { series, count } = this.data;
    const all = Array.from({ length: count }, (_, index) => series.map(({ values }) => values[index] ?? 0));
    return Math.max(...all.map((values) => (this.stacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values))));
  }

  labels(values, y, width, minutes) {
    const ago = (share) => (share ? `${minutes * share} min ago` : "now");
    const texts = [
      ...values.map((value) => ({ words: value ? this.format(value) : "0", x: LEFT - 6, y: y(value), anchor: "end", rule: true })),
      ...[[1, LEFT, "start"], [0.5, (LEFT + width - RIGHT) / 2, "middle"], [0, width - RIGHT, "end"]].map(([share, x, anchor]) => ({ words: ago(share), x, y: HEIGHT - 6, anchor, rule: false })),
    ];
    keyed(
      this.grid,
      texts.map((label, number) => ({ ...label, number })),
      (label) => label.number + (label.rule ? 0 : 10),
      () => svg("g", {}, svg("line"), svg("text")),
      (node, { words, x, y: height, anchor, rule }) => {
        const [stroke, text] = node.children;
        for (const [name, value] of Object.entries({ x1: LEFT, x2: width - RIGHT, y1: height, y2: height, visibility: rule ? null : "hidden" })) setAttribute(stroke, name, value);
        for (const [name, value] of Object.entries({ x, y: height, "text-anchor": anchor, class: rule ? "value" : "time" })) setAttribute(text, name, value);
        setText(text, words);
      },
    );
  }

  /** Shows the chosen values, or the latest ones if none are chosen. */
  read() {
    const { startS, bucketS, series, count } = this.data;
    const index = this.chosen ?? count - 1;
    const words = this.chosen === null ? `last ${bucketS} s` : clock(startS + index * bucketS);
    const said = ({ values }) => (values[index] === null ? "–" : this.format(values[index]));
    setText(this.when, words);
    keyed(this.values, series, (entry) => entry.name, (entry) => h("li", {}, h("span", { class: "name" }, entry.name), h("span", { class: "value" })), (node, entry) => {
      setAttribute(node, "class", `tone-${entry.tone}`);
      setText(node.lastElementChild, said(entry));
    });
    for (const [name, value] of Object.entries({ x1: this.x?.(index + 0.5), x2: this.x?.(index + 0.5), visibility: this.chosen === null ? "hidden" : null })) setAttribute(this.cursor, name, value);
    setAttribute(this.plot, "aria-valuemax", count - 1);
    setAttribute(this.plot, "aria-valuenow", index);
    setAttribute(this.plot, "aria-valuetext", this.nothing.textContent || `${words}: ${series.map((entry) => `${entry.name} ${said(entry)}`).join(", ")}`);
  }
}

/** Returns the next round number whose half is easy to read, too. */
function ceiling(value) {
  const zeros = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 6, 8, 10].map((digit) => digit * zeros).find((end) => end >= value * 0.999);
}

/** Returns a path with gaps where values are not known. A single value is a line of no length, whose round ends make it a dot. */
function line(values, x, y) {
  let path = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const isFirst = (values[index - 1] ?? null) === null;
    path += `${isFirst ? "M" : "L"}${x(index + 0.5).toFixed(1)} ${y(value).toFixed(1)}`;
    if (isFirst) path += "h0";
  });
  return path;
}

function bars(series, x, y) {
  const below = series[0].values.map(() => 0);
  return series.map((entry) => {
    const path = entry.values.map((value, index) => {
      if (!value) return "";
      const [from, to] = [y(below[index]), y((below[index] += value))];
      return `M${x(index + 0.1).toFixed(1)} ${from.toFixed(1)}V${to.toFixed(1)}H${x(index + 0.9).toFixed(1)}V${from.toFixed(1)}Z`;
    });
    return { ...entry, d: path.join("") };
  });
}

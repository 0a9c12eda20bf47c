// The last minutes of traffic, of the fleet or of one replica: four charts, and the busiest adapters.

import { adapterLink, address } from "./addresses.js";
import { Chart } from "./charts.js";
import { h, keyed, setText } from "./dom.js";
import { percent, rate, seconds, whole } from "./format.js";

const CHARTED = 5; // number of adapters with a colour of their own
const OTHERS = 0; // the tone of all others; adapters have 1 to CHARTED
const BASE = CHARTED + 1;
const MIX = "+"; // between the names of adapters that one request mixes

export class Traffic {
  constructor(parent) {
    this.tones = new Map(); // tone of each adapter by name
    this.tokens = new Chart({ title: "Tokens", unit: "tokens/s", format: rate });
    this.latency = new Chart({ title: "Time to first token", unit: "median and p99", format: seconds });
    this.requests = new Chart({ title: "Requests by adapter", unit: "requests/s", format: rate, stacked: true });
    this.loads = new Chart({ title: "Adapter loads", unit: "loads in 5 s", format: (value) => (Number.isInteger(value) ? whole(value) : value.toFixed(1)) });
    this.title = h("h3");
    this.charts = h("div", { class: "charts" }, ...[this.tokens, this.latency, this.requests, this.loads].map((chart) => chart.node));
    this.unknown = h("p", { class: "empty" });
    this.rows = h("tbody", { role: "rowgroup" });
    this.table = h("table", { class: "busiest", role: "table", "aria-label": "Busiest adapters" }, head("Name", "Requests", "Share", "Tokens"), this.rows);
    this.idle = h("p", { class: "empty" });
    this.span = h("span", { class: "count" });
    parent.append(
      h("section", { class: "panel", "aria-label": "Traffic" }, h("header", {}, this.title), this.unknown, this.charts),
      h("section", { class: "panel", "aria-label": "Busiest adapters" }, h("header", {}, h("h3", {}, "Busiest adapters"), this.span, h("a", { class: "link", href: address("adapters", "", [["order", "busiest"]]) }, "Show more")), this.table, this.idle),
    );
  }

  /** Draws the history, or shows `unknown` if there is none. */
  draw({ history = null, base_models: [base] }, unknown) {
    this.unknown.hidden = history !== null;
    this.charts.hidden = history === null;
    setText(this.unknown, unknown);
    const over = history === null ? "" : `last ${(history.requests.length * history.bucket_s) / 60} minutes`;
    setText(this.title, over ? `Traffic, ${over}` : "Traffic");
    setText(this.span, over);
    this.busiest(history, over);
    if (history !== null) this.chart(history, base, over);
  }

  chart(history, base, over) {
    const { start_s: startS, bucket_s: bucketS } = history;
    const perS = (values) => values.map((value) => value / bucketS);
    const none = `No requests in the ${over}.`;
    const draw = (chart, empty, ...series) => chart.draw({ startS, bucketS, empty, series: series.map(([name, tone, values]) => ({ name, tone, values })) });
    draw(this.tokens, none, ["generated", 1, perS(history.tokens)], ["prompts", 2, perS(history.prompt_tokens)]);
    draw(this.latency, `No request received a token in the ${over}.`, ["median", 1, history.median_first_token_s], ["p99", 2, history.p99_first_token_s]);
    draw(this.requests, none, ...this.byAdapter(history, base).map(([name, tone, values]) => [name, tone, perS(values)]));
    this.loads.node.hidden = history.slot_loads === null;
    if (history.slot_loads === null) return;
    draw(this.loads, `No adapter was loaded in the ${over}.`, ["into slots", 1, history.slot_loads], ["into host memory", 2, history.memory_loads]);
  }

  /** Returns [name, tone, series] of the busiest adapters, of the base, and of all others together. */
  byAdapter({ requests, busiest, base: ofBase }, base) {
    const charted = busiest.slice(0, CHARTED);
    this.assignTones(charted.map((adapter) => adapter.name));
    const named = [...charted, ofBase];
    const others = requests.map((all, index) => named.reduce((left, adapter) => left - adapter.series[index], all));
    return [
      ...charted.map((adapter) => [adapter.name, this.tones.get(adapter.name), adapter.series]),
      [`${base} (base)`, BASE, ofBase.series],
      ["all others", OTHERS, others.map((value) => Math.max(0, value))],
    ];
  }

  /** Assigns tones, so that an adapter keeps its colour for as long as it is charted. */
  assignTones(names) {
    for (const name of this.tones.keys()) if (!names.includes(name)) this.tones.delete(name);
    const free = Array.from({ length: CHARTED }, (_, number) => number + 1).filter((tone) => ![...this.tones.values()].includes(tone));
    for (const name of names) if (!this.tones.has(name)) this.tones.set(name, free.shift());
  }

  busiest(history, over) {
    const adapters = history?.busiest ?? [];
    const total = history === null ? 0 : history.requests.reduce((sum, count) => sum + count, 0);
    this.table.hidden = !adapters.length;
    this.idle.hidden = adapters.length > 0;
    setText(this.idle, history === null ? this.unknown.textContent : total ? `All requests in the ${over} were for the base model.` : `No adapter was requested in the ${over}.`);
    keyed(this.rows, adapters, (adapter) => adapter.name, row, (node, adapter) => {
      const [, requests, share, tokens] = node.children;
      setText(requests, whole(adapter.requests));
      setText(share, percent(adapter.requests / Math.max(1, total)));
      setText(tokens, whole(adapter.tokens));
    });
  }
}

function head(...names) {
  const cells = names.map((name, number) => h("th", { role: "columnheader", scope: "col", class: number ? "number" : "name" }, name));
  return h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...cells));
}

function row({ name }) {
  const cell = (label) => h("td", { role: "cell", class: "number", "data-label": label });
  return h("tr", { role: "row" }, h("th", { role: "rowheader", scope: "row", class: "name" }, name.includes(MIX) ? name : adapterLink(name)), cell("Requests"), cell("Share"), cell("Tokens"));
}

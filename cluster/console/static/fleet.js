// The fleet: totals, each replica's slots and memory as a picture, loads in progress and recent errors.

import { byId, h, hueOf, keyed, setAttribute, setText, svg } from "./dom.js";
import { clock, middle, percent, plural, rate, seconds, shortDigest, shortReplica, whole } from "./format.js";

const GAP = 4;
const WIDE = 112; // of a slot that has its adapter's name in it
const HEIGHT = 26;
const SMALL = 16; // of a slot without, where there are many
const NAMED_SLOTS = 64;
const LETTER = 6.3; // mean width of one, at this size
const DOT = 9; // an adapter in host memory
const MAX_DOTS = 160;

const NOT_SHOWN = "empty, or not yours";

const KINDS = {
  load: "reading, as told",
  pin: "filling a slot, as pinned",
  unpin: "letting a slot go",
  drop: "forgetting, when its requests end",
  read: "reading; requests wait",
  fill: "waiting for a slot",
};

export function makeFleet({ open, pageReplicas }) {
  const pager = new Pager(byId("replica-pager"), "replicas", pageReplicas);
  const pictures = new Map();
  let last = null;
  new ResizeObserver(() => last && draw(last)).observe(byId("replicas"));

  function draw(state) {
    last = state;
    tiles(state);
    pager.show(state.last_replica, state.more_replicas);
    const coming = new Map();
    for (const one of state.loads) coming.set(one.replica, (coming.get(one.replica) ?? 0) + 1);
    keyed(
      byId("replicas"),
      state.replicas,
      (one) => one.replica,
      (one) => {
        const picture = new Picture(open);
        pictures.set(one.replica, picture);
        return picture.node;
      },
      (_, one) => pictures.get(one.replica).draw(one, state.names, coming.get(one.replica) ?? 0, state.viewer.sees_all),
    );
    for (const id of pictures.keys()) {
      if (!state.replicas.some((one) => one.replica === id)) pictures.delete(id);
    }
    loads(state.loads, open);
    errors(state.failures, open);
  }
  return { draw, reset: () => pager.reset() };
}

function tiles({ total, load, num_replicas, num_adapters, window_s }) {
  const over = `${window_s / 60} min`;
  const shown = [
    ["Replicas", whole(num_replicas)],
    ...(num_adapters === null ? [] : [["Adapters", whole(num_adapters)]]),
    [`Requests, ${over}`, whole(total.requests)],
    ["Tokens/s", rate(total.tokens / window_s)],
    ["p95 TTFT", seconds(total.p95_first_token_s)],
    ...(load === null
      ? []
      : [
          ["Running", `${whole(load.num_running)} of ${whole(load.max_num_seqs)}`],
          ["Waiting", whole(load.num_waiting)],
          ["KV cache", percent(load.kv_used)],
        ]),
    ["Failed", whole(total.failed)],
  ];
  keyed(
    byId("tiles"),
    shown,
    ([name]) => name,
    ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (node, [, value]) => setText(node.lastElementChild, value),
  );
}

/** One replica. Its slots are one stop of the Tab key; arrow keys go from one to the next. */
class Picture {
  constructor(open) {
    this.open = open;
    this.title = h("h4");
    this.state = h("span", { class: "badge" });
    this.facts = h("span", { class: "facts" });
    this.drawing = svg("svg", { class: "slots", role: "group" });
    this.slots = svg("g");
    this.memory = svg("g", { class: "memory" });
    this.drawing.append(this.slots, this.memory);
    this.node = h("li", { class: "replica" }, h("header", {}, this.title, this.state, this.facts), this.drawing);
    this.drawing.addEventListener("keydown", (event) => this.move(event));
    this.at = 0;
  }

  /** seesAll: else a slot or place that shows nothing may be another tenant's. */
  draw(replica, names, numComing, seesAll) {
    setText(this.title, shortReplica(replica.replica));
    setAttribute(this.title, "title", replica.replica);
    setText(this.state, replica.state);
    setAttribute(this.state, "data-state", replica.state);
    setText(this.facts, facts(replica, numComing, seesAll));
    const slots = replica.slots ?? [];
    const width = Math.max(120, Math.floor(this.node.clientWidth || 300));
    const named = slots.length <= NAMED_SLOTS;
    const least = named ? Math.min(WIDE, (width - GAP) / 2) : SMALL;
    const columns = Math.max(1, Math.floor((width + GAP) / (least + GAP)));
    const cell = named ? (width - GAP * (columns - 1)) / columns : SMALL;
    const high = named ? HEIGHT : SMALL;
    const rows = Math.ceil(slots.length / columns);
    const pinned = new Set(replica.pinned);
    this.at = Math.min(this.at, Math.max(0, slots.length - 1));
    keyed(
      this.slots,
      slots.map((digest, number) => ({ digest, number })),
      (one) => one.number,
      () => this.slot(),
      (node, { digest, number }) => {
        const x = (number % columns) * (cell + GAP);
        const y = Math.floor(number / columns) * (high + GAP);
        const letters = named ? Math.floor((cell - 14) / LETTER) : 0;
        fillSlot(node, { digest, number, name: names[digest], pinned: pinned.has(digest), letters, none: seesAll ? "empty" : NOT_SHOWN });
        place(node, x, y, cell, high, number === this.at);
      },
    );
    const below = rows * (high + GAP) + (rows ? 6 : 0);
    const end = memory(this.memory, replica, names, width, below, seesAll);
    setAttribute(this.drawing, "viewBox", `0 0 ${width} ${end}`);
    setAttribute(this.drawing, "height", end);
    setAttribute(this.drawing, "aria-label", `Replica ${shortReplica(replica.replica)}: ${held(replica.slots ?? [], seesAll)} slots hold an adapter`);
  }

  slot() {
    const node = svg("g", { class: "slot", role: "button" }, svg("title"), svg("rect", { rx: 4 }), svg("text"), svg("circle", { r: 3 }));
    node.addEventListener("click", () => this.choose(node));
    return node;
  }

  choose(node) {
    this.focus(node.key);
    if (node.dataset.name) this.open(node.dataset.name);
  }

  focus(number) {
    this.at = number;
    for (const one of this.slots.children) setAttribute(one, "tabindex", one.key === number ? 0 : -1);
    this.slots.children[number]?.focus();
  }

  move(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const count = this.slots.children.length;
    if (event.key in steps) this.focus((this.at + steps[event.key] + count) % count);
    else if (event.key === "Home") this.focus(0);
    else if (event.key === "End") this.focus(count - 1);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.slots.children[this.at]);
    else return;
    event.preventDefault();
  }
}

function facts(replica, numComing, seesAll) {
  const said = [];
  if (replica.slots) said.push(`${held(replica.slots, seesAll)} ${replica.slots.length === 1 ? "slot" : "slots"}`);
  if (replica.num_running !== undefined) {
    said.push(`${replica.num_running} running`, `${replica.num_waiting} waiting`, `KV ${percent(replica.kv_used)}`);
  }
  if (numComing) said.push(`${plural(numComing, "load")} under way`);
  return said.join(" · ");
}

const held = (slots, seesAll) => `${slots.filter(Boolean).length} ${seesAll ? "of" : "shown of"} ${slots.length}`;

function fillSlot(node, { digest, number, name, pinned, letters, none }) {
  const [title, , text] = node.children;
  const label = name === undefined ? "" : name;
  const words = label ? `slot ${number}: ${label}, ${shortDigest(digest)}${pinned ? ", pinned" : ""}` : `slot ${number}: ${none}`;
  setText(title, words);
  setAttribute(node, "aria-label", words);
  setAttribute(node, "aria-disabled", label ? false : "true");
  node.dataset.name = label;
  setAttribute(node, "class", `slot${label ? " held" : ""}${pinned ? " pinned" : ""}`);
  node.style.setProperty("--hue", label ? hueOf(digest) : 0);
  setText(text, letters ? middle(label, pinned ? letters - 2 : letters) : "");
}

function place(node, x, y, width, height, isCurrent) {
  const [, rect, text, pin] = node.children;
  for (const [name, value] of Object.entries({ x: x + 0.5, y: y + 0.5, width: width - 1, height: height - 1 })) setAttribute(rect, name, value);
  setAttribute(text, "x", x + 7);
  setAttribute(text, "y", y + height / 2);
  setAttribute(pin, "cx", x + width - 6);
  setAttribute(pin, "cy", y + 6);
  setAttribute(node, "tabindex", isCurrent ? 0 : -1);
}

/** Host memory: a dot for each adapter, and one for each place that is free. Returns where it ends. */
function memory(group, replica, names, width, top, seesAll) {
  const places = replica.cpu_loras ?? 0;
  if (!places) {
    group.replaceChildren();
    return Math.max(top, 1);
  }
  if (!group.firstChild) group.append(svg("text", { class: "caption" }), svg("g", { class: "dots" }));
  const [caption, dots] = group.children;
  const known = replica.in_cpu;
  setText(caption, `Host memory ${known.length} ${seesAll ? "of" : "shown of"} ${places}`);
  setAttribute(caption, "x", 0);
  setAttribute(caption, "y", top + 8);
  const step = DOT + 2;
  const columns = Math.max(1, Math.floor(width / step));
  const shown = Math.max(Math.min(known.length, MAX_DOTS), Math.min(places, columns));
  keyed(
    dots,
    Array.from({ length: shown }, (_, number) => ({ number, digest: known[number] })),
    (one) => one.number,
    () => svg("rect", { width: DOT, height: DOT, rx: 2 }, svg("title")),
    (node, { number, digest }) => {
      setAttribute(node, "x", (number % columns) * step);
      setAttribute(node, "y", top + 16 + Math.floor(number / columns) * step);
      setAttribute(node, "class", digest ? "held" : "free");
      node.style.setProperty("--hue", digest ? hueOf(digest) : 0);
      setText(node.firstElementChild, digest ? names[digest] : seesAll ? "free" : NOT_SHOWN);
    },
  );
  return top + 16 + Math.ceil(shown / columns) * step;
}

function loads(list, open) {
  setText(byId("loads-count"), list.length ? whole(list.length) : "");
  keyed(
    byId("loads"),
    list.length ? list : [null],
    (one) => (one ? `${one.replica} ${one.digest} ${one.kind}` : ""),
    (one) => (one ? h("li", {}, link(one.adapter, open), h("span", { class: "what" }), h("span", { class: "at" })) : nothing("Nothing is being loaded.")),
    (node, one) => {
      if (!one) return;
      const [, what, at] = node.children;
      setText(what, KINDS[one.kind] ?? one.kind);
      setText(at, one.since_s ? `${shortReplica(one.replica)}, since ${clock(one.since_s)}` : shortReplica(one.replica));
    },
  );
}

function errors(list, open) {
  setText(byId("errors-count"), list.length ? whole(list.length) : "");
  keyed(
    byId("errors"),
    list.length ? list : [null],
    (one) => (one ? `${one.replica} ${one.adapter} ${one.code} ${one.tenant}` : ""),
    (one) =>
      one
        ? h("li", {}, h("time", { class: "at" }), h("code", {}, one.code), one.adapter ? link(one.adapter, open) : null, h("span", { class: "times" }), h("span", { class: "what" }))
        : nothing("None since the replicas started."),
    (node, one) => {
      if (!one) return;
      setText(node.querySelector("time"), `${clock(one.at_s)} ${shortReplica(one.replica)}`);
      setText(node.querySelector(".times"), one.count > 1 ? `× ${whole(one.count)}` : "");
      setText(node.querySelector(".what"), one.message);
    },
  );
}

const nothing = (words) => h("li", { class: "none" }, words);

export const link = (name, open) => h("button", { type: "button", class: "link", title: name, onclick: () => open(name) }, name);

/** Pages of a list that is asked for from behind a name. */
export class Pager {
  constructor(at, what, go) {
    this.at = at;
    this.go = go;
    this.pages = [""]; // the names before each page so far
    this.back = h("button", { type: "button", onclick: () => this.turn(-1), "aria-label": `Previous ${what}` }, "‹");
    this.on = h("button", { type: "button", onclick: () => this.turn(1), "aria-label": `Next ${what}` }, "›");
    this.number = h("span", { "aria-live": "polite" });
    at.append(this.back, this.number, this.on);
  }

  reset() {
    this.pages = [""];
  }

  show(last, hasMore) {
    this.last = last;
    this.back.disabled = this.pages.length === 1;
    this.on.disabled = !hasMore;
    this.at.hidden = this.pages.length === 1 && !hasMore;
    setText(this.number, `page ${this.pages.length}`);
  }

  turn(by) {
    if (by > 0) this.pages.push(this.last);
    else this.pages.pop();
    this.go(this.pages.at(-1));
  }
}

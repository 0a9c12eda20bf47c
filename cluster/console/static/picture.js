// One replica as a picture: its slots, and its host memory.

import { address } from "./addresses.js";
import { h, hueOf, keyed, setAttribute, setText, svg } from "./dom.js";
import { middle, percent, plural, shortDigest, shortReplica } from "./format.js";

const GAP = 4;
const WIDE = 112; // width of a slot that shows its adapter's name
const HEIGHT = 26;
const SMALL = 16; // width of a slot without a name, if there are many
const NAMED_SLOTS = 64;
const LETTER = 6.3; // mean width of a letter at this size
const DOT = 9; // size of the mark of an adapter in host memory
const MAX_DOTS = 160;

const NOT_SHOWN = "empty, or not yours";

/** The picture of one replica. Its slots are one stop of the Tab key, and arrow keys move between them. */
export class Picture {
  constructor() {
    this.title = h("a");
    this.state = h("span", { class: "badge" });
    this.facts = h("span", { class: "facts" });
    this.drawing = svg("svg", { class: "slots", role: "group" });
    this.slots = svg("g");
    this.memory = svg("g", { class: "memory" });
    this.drawing.append(this.slots, this.memory);
    this.node = h("li", { class: "replica" }, h("header", {}, h("h4", {}, this.title), this.state, this.facts), this.drawing);
    this.drawing.addEventListener("keydown", (event) => this.move(event));
    this.current = 0;
  }

  /** Draws the replica. Unless the viewer sees all, a slot or place that shows nothing may be another tenant's. */
  draw(replica, names, numComing, seesAll) {
    setText(this.title, shortReplica(replica.replica));
    setAttribute(this.title, "title", replica.replica);
    setAttribute(this.title, "href", address("replicas", replica.replica));
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
    this.current = Math.min(this.current, Math.max(0, slots.length - 1));
    keyed(
      this.slots,
      slots.map((digest, number) => ({ digest, number })),
      (slot) => slot.number,
      () => this.slot(),
      (node, { digest, number }) => {
        const x = (number % columns) * (cell + GAP);
        const y = Math.floor(number / columns) * (high + GAP);
        const letters = named ? Math.floor((cell - 14) / LETTER) : 0;
        fillSlot(node, { digest, number, name: names[digest], pinned: pinned.has(digest), letters, none: seesAll ? "empty" : NOT_SHOWN });
        place(node, x, y, cell, high, number === this.current);
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
    if (node.dataset.name) location.hash = address("adapters", node.dataset.name);
  }

  focus(number) {
    this.current = number;
    for (const slot of this.slots.children) setAttribute(slot, "tabindex", slot.key === number ? 0 : -1);
    this.slots.children[number]?.focus();
  }

  move(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const count = this.slots.children.length;
    if (event.key in steps) this.focus((this.current + steps[event.key] + count) % count);
    else if (event.key === "Home") this.focus(0);
    else if (event.key === "End") this.focus(count - 1);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.slots.children[this.current]);
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
  if (numComing) said.push(`${plural(numComing, "load")} in progress`);
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

/** Draws host memory as a dot for each adapter and each free place. Returns the y coordinate of its end. */
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
    (dot) => dot.number,
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

// The table of adapters: a page of them at a time, searched and ordered by the server.

import { adapterLink } from "./addresses.js";
import { byId, h, keyed, setAttribute, setText } from "./dom.js";
import { bytes, plural, rate, seconds, shortDigest, shortReplica, split, whole } from "./format.js";
import { Pager } from "./pager.js";

const TYPING_MS = 200;
const BY_NAME = "name"; // the default order, which addresses leave out
const TIERS = [
  ["gpu", "slot"],
  ["coming", "loading"],
  ["cpu", "memory"],
];

export function makeAdapters({ ask, readdress }) {
  const pager = new Pager(byId("adapter-pager"), "adapters", (after) => ask({ after }));
  const search = byId("search");
  const order = byId("order");
  let wanted = { search: "", order: "" };
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(turn, TYPING_MS);
  });
  order.addEventListener("change", turn);

  function turn() {
    wanted = { search: search.value.trim(), order: order.value === BY_NAME ? "" : order.value };
    pager.reset();
    readdress(Object.entries(wanted));
    ask({ ...wanted, after: "" });
  }

  /** Reads the search and order from an address. Returns the query to send, which keeps the page if nothing changes. */
  function choose(query) {
    const orders = [...order.options].map((option) => option.value);
    const given = { search: (query.get("search") ?? "").slice(0, search.maxLength), order: orders.includes(query.get("order")) && query.get("order") !== BY_NAME ? query.get("order") : "" };
    if (given.search === wanted.search && given.order === wanted.order) return wanted;
    clearTimeout(typing);
    wanted = given;
    search.value = wanted.search;
    order.value = wanted.order || BY_NAME;
    pager.reset();
    return { ...wanted, after: "" };
  }

  function draw(state) {
    pager.show(state.after, state.has_more);
    setText(byId("adapters-count"), state.num_adapters === null ? "" : whole(state.num_adapters));
    keyed(byId("rows"), state.adapters, (adapter) => adapter.name, row, (node, adapter) => fill(node, adapter, state.window_s));
    const empty = byId("no-rows");
    empty.hidden = state.adapters.length > 0;
    setText(empty, search.value ? "No adapter name or alias matches the search." : "No adapters yet. Push one, or send a request for one that a resolver finds.");
  }
  return { draw, choose, reset: () => pager.reset() };
}

const cell = (kind, label, ...content) => h("td", { role: "cell", class: kind, "data-label": label }, ...content);

function row(adapter) {
  return h(
    "tr",
    { role: "row" },
    h("th", { role: "rowheader", scope: "row", class: "name" }, adapterLink(adapter.name), h("span", { class: "tags" })),
    cell("serves", "Serves"),
    cell("digest", "Digest", h("code")),
    cell("size", "Rank, size"),
    cell("where", "Where"),
    cell("number rate", "Requests"),
    cell("number tokens", "Tokens/s"),
    cell("number first", "p95 TTFT"),
  );
}

function fill(node, adapter, windowS) {
  const [name, serves, digest, size, where, requests, tokens, first] = node.children;
  const present = current(adapter);
  tags(name.querySelector(".tags"), adapter);
  setText(serves, adapter.found ? "resolved" : adapter.aliases[adapter.name] ? split(adapter.aliases[adapter.name]) : "–");
  setText(digest.firstElementChild, present ? shortDigest(present.digest) : "–");
  setAttribute(digest, "title", present?.digest ?? null);
  setText(size, present && present.rank !== null ? `r${present.rank}, ${bytes(present.num_bytes)}` : "–");
  places(where, adapter);
  setText(requests, whole(adapter.traffic.requests));
  setText(tokens, rate(adapter.traffic.tokens / windowS));
  setText(first, seconds(adapter.traffic.p95_first_token_s));
}

/** Returns the version that receives most requests for the adapter's name. */
export function current(adapter) {
  const shares = Object.entries(adapter.aliases[adapter.name] ?? {}).sort((a, b) => b[1] - a[1]);
  const number = shares.length ? Number(shares[0][0]) : null;
  return adapter.versions.find((version) => version.number === number) ?? adapter.versions.at(-1);
}

function tags(parent, adapter) {
  const shown = [];
  const others = Object.keys(adapter.aliases).filter((alias) => alias !== adapter.name);
  if (adapter.pinned_replicas) shown.push(["pinned", adapter.pinned_replicas > 1 ? `pinned × ${adapter.pinned_replicas}` : "pinned"]);
  if (adapter.removing) shown.push(["removing", "being removed"]);
  if (adapter.found) shown.push(["found", "resolved"]);
  if (adapter.tenant !== null) shown.push(["tenant", adapter.tenant]);
  if (others.length) shown.push(["alias", others.length > 2 ? `${others.length} aliases` : others.join(", ")]);
  keyed(parent, shown, ([kind]) => kind, ([kind]) => h("span", { class: `tag ${kind}` }), (node, [, words]) => setText(node, words));
}

/** Shows how many replicas have any version of the adapter in each tier. The titles name the replicas. */
function places(parent, adapter) {
  const best = {};
  for (const version of adapter.versions) {
    for (const [replica, tier] of Object.entries(version.tiers)) {
      if (!best[replica] || rank(tier) < rank(best[replica])) best[replica] = tier;
    }
  }
  const shown = TIERS.map(([tier, words]) => [tier, words, Object.keys(best).filter((replica) => best[replica] === tier)]).filter(([, , replicas]) => replicas.length);
  const homes = [...new Set(adapter.versions.flatMap((version) => version.homes))];
  setAttribute(parent, "title", homes.length ? `Homes: ${homes.map(shortReplica).join(", ")}` : null);
  const list = shown.length ? shown : [["disk", homes.length ? `${plural(homes.length, "home")}, not loaded` : "not loaded", []]];
  keyed(
    parent,
    list,
    ([tier]) => tier,
    ([tier]) => h("span", { class: `tier ${tier}` }),
    (node, [, words, replicas]) => {
      setText(node, replicas.length > 1 ? `${words} × ${replicas.length}` : words);
      setAttribute(node, "title", replicas.map(shortReplica).join(", ") || null);
    },
  );
}

const rank = (tier) => TIERS.findIndex(([name]) => name === tier);

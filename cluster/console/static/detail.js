// One adapter in a sheet: its versions, the present and past targets of its names, its places, and the actions on it.

import { actionsOf } from "./actions.js";
import { fitsPath, inPath } from "./addresses.js";
import { get } from "./api.js";
import { byId, h, hueOf, setText } from "./dom.js";
import { bytes, day, percent, plural, rate, seconds, shortReplica, split, whole } from "./format.js";

const WORDS = { gpu: "in a slot", coming: "loading", cpu: "in host memory" };

const sheet = byId("detail");
const body = byId("detail-body");

/** rights(adapter) returns why it cannot be changed or pinned, or null. changed() is called after an action, closed() when the viewer closes the sheet, and tryIt(name) opens the playground. */
export function makeDetail({ rights, changed, closed, tryIt, needKey }) {
  let name = null;
  let shown = "";
  sheet.querySelector(".close").addEventListener("click", () => sheet.close());
  sheet.addEventListener("close", () => {
    if (name === null) return;
    name = null;
    closed();
  });
  sheet.addEventListener("click", (event) => event.target === sheet && sheet.close()); // a click beside the sheet

  async function open(wanted) {
    if (name === wanted) return;
    name = wanted;
    shown = "";
    setText(byId("detail-title"), name);
    body.replaceChildren(h("p", { class: "empty" }, "Loading"));
    if (!sheet.open) sheet.showModal();
    await refresh();
  }

  /** Closes the sheet without changing the address. */
  function hide() {
    name = null;
    sheet.close();
  }

  /** Draws the sheet only if something has changed, so that reading and focus are not disturbed. */
  async function refresh() {
    const wanted = name;
    if (wanted === null) return;
    try {
      if (!fitsPath(wanted)) throw new Error(`There is no adapter ${wanted}: this is not a valid name.`);
      const adapter = await get(`v1/console/adapters/${inPath(wanted)}`);
      if (name !== wanted) return;
      const now = JSON.stringify([adapter, rights(adapter)]);
      if (now !== shown) draw(adapter);
      shown = now;
    } catch (error) {
      if (name !== wanted) return;
      shown = "";
      body.replaceChildren(h("p", { class: "empty" }, error.message));
    }
  }

  function draw(adapter) {
    const focused = document.activeElement?.dataset?.act;
    const { change: reason, pin: pinReason } = rights(adapter);
    const after = async () => {
      await changed();
      await refresh();
    };
    const act = actionsOf(adapter, { after, removed: () => sheet.close() });
    const button = (id, words, run, { open: isOpen = reason === null, danger = false, why = reason } = {}) =>
      h("button", { type: "button", class: danger ? "danger" : "", "data-act": id, disabled: !isOpen, title: isOpen ? null : why, "aria-describedby": isOpen || !why ? null : "closed", onclick: run }, words);
    const pinning = { open: pinReason === null, why: pinReason };
    const parts = [
      h("p", { class: "tagline" }, tagline(adapter)),
      h(
        "div",
        { class: "buttons" },
        button("try", "Try it", () => { hide(); tryIt(adapter.name); }, { open: true }),
        button("push", "New version", act.push),
        adapter.pinned_replicas ? button("unpin", "Unpin", act.unpin, pinning) : button("pin", "Pin", act.pin, pinning),
        button("prefetch", "Prefetch", act.prefetch),
        button("verify", "Verify", act.verify),
        button("remove", "Remove", act.remove, { danger: true }),
      ),
      (reason ?? pinReason) === null ? null : h("p", { class: "reason", id: "closed" }, reason ?? pinReason, " ", h("button", { type: "button", class: "link", onclick: needKey }, "Enter a key")),
      adapter.found ? h("p", {}, "A resolver found it, so it is not in the catalogue. If you remove it, the next request asks the resolvers again.") : names(adapter, act, button),
      versions(adapter),
      traffic(adapter.traffic),
    ];
    body.replaceChildren(...parts.filter((part) => part !== null));
    if (focused) body.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
  }
  return {
    open,
    hide,
    refresh,
    get isOpen() {
      return name !== null;
    },
  };
}

function tagline(adapter) {
  const said = [plural(adapter.versions.length, "version")];
  if (adapter.tenant !== null) said.push(`tenant ${adapter.tenant}`);
  if (adapter.pinned_replicas) said.push(`pinned to ${plural(adapter.pinned_replicas, "replica")}`);
  if (adapter.removing) said.push("being removed: it disappears when its requests have ended");
  return said.join(" · ");
}

function names(adapter, act, button) {
  const lines = Object.entries(adapter.history).map(([alias, moves]) =>
    h(
      "li",
      {},
      h("div", { class: "line" }, h("strong", {}, alias), h("span", {}, `stands for ${split(moves.at(-1).split)}`), h("span", { class: "at" }, `since ${day(moves.at(-1).at_s)}`)),
      h(
        "div",
        { class: "buttons small" },
        button(`move ${alias}`, "Move", () => act.alias(alias)),
        button(`rollback ${alias}`, moves.length > 1 ? `Roll back to ${split(moves.at(-2).split)}` : "Roll back", () => act.rollback(alias, moves), {
          ...(moves.length > 1 ? {} : { open: false }),
        }),
        alias === adapter.name ? null : button(`drop ${alias}`, "Remove alias", () => act.unalias(alias)),
      ),
      moves.length > 1 ? h("details", {}, h("summary", {}, "History"), h("ol", { class: "history" }, ...moves.toReversed().map((move) => h("li", {}, `${day(move.at_s)}: ${split(move.split)}`)))) : null,
    ),
  );
  return h("section", {}, h("h3", {}, "Names"), h("ul", { class: "aliases" }, ...lines), adapter.removing ? null : button("alias", "Add alias", () => act.alias(null)));
}

function versions(adapter) {
  const list = adapter.versions.toReversed().map((version) =>
    h(
      "li",
      { hue: hueOf(version.digest) },
      h("div", { class: "line" }, h("strong", { class: "swatch" }, version.number === null ? "found" : `v${version.number}`), version.rank === null ? null : h("span", {}, `rank ${version.rank}, ${bytes(version.num_bytes)}`), version.created_s === null ? null : h("span", { class: "at" }, day(version.created_s))),
      h("code", { class: "whole" }, version.digest),
      version.source ? h("p", { class: "source" }, `from ${version.source}`) : null,
      ...Object.entries(version.metadata).map(([key, value]) => h("p", { class: "source" }, `${key}: ${value}`)),
      where(version),
    ),
  );
  return h("section", {}, h("h3", {}, "Versions"), h("ul", { class: "versions" }, ...list));
}

function where(version) {
  const replicas = [...new Set([...version.homes, ...Object.keys(version.tiers)])].sort();
  if (!replicas.length) return h("p", { class: "source" }, "Not on any replica.");
  return h(
    "ul",
    { class: "places" },
    ...replicas.map((replica) => h("li", { title: replica }, h("span", { class: `tier ${version.tiers[replica] ?? "disk"}` }, WORDS[version.tiers[replica]] ?? "not loaded"), ` at ${shortReplica(replica)}${version.homes.includes(replica) ? ", a home" : ""}`)),
  );
}

function traffic({ requests, failed, tokens, p95_first_token_s, accepted_drafts }) {
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const drafts = accepted_drafts === null ? [] : [fact("Accepted drafts", percent(accepted_drafts))];
  return h("section", {}, h("h3", {}, "Last five minutes"), h("dl", { class: "tiles" }, fact("Requests", whole(requests)), fact("Failed", whole(failed)), fact("Tokens/s", rate(tokens / 300)), fact("p95 TTFT", seconds(p95_first_token_s)), ...drafts));
}

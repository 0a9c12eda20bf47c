// Replicas as pictures, with the loads that are in progress there and the errors of the last time.

import { adapterLink } from "./addresses.js";
import { byId, h, keyed, setText } from "./dom.js";
import { clock, shortReplica, whole } from "./format.js";
import { Picture } from "./picture.js";

const KINDS = {
  load: "reading, as told",
  pin: "filling a slot, as pinned",
  unpin: "letting a slot go",
  drop: "forgetting, when its requests end",
  read: "reading; requests wait",
  fill: "waiting for a slot",
};

export class Replicas {
  /** The ids of three lists of the page; the counts of the last two have "-count" behind them. */
  constructor(replicas, loads, errors) {
    this.ids = { replicas, loads, errors };
    this.pictures = new Map();
    this.last = null;
    new ResizeObserver(() => this.last && this.draw(this.last)).observe(byId(replicas));
  }

  draw(state) {
    this.last = state;
    const coming = new Map();
    for (const one of state.loads) coming.set(one.replica, (coming.get(one.replica) ?? 0) + 1);
    keyed(
      byId(this.ids.replicas),
      state.replicas,
      (one) => one.replica,
      (one) => {
        const picture = new Picture();
        this.pictures.set(one.replica, picture);
        return picture.node;
      },
      (_, one) => this.pictures.get(one.replica).draw(one, state.names, coming.get(one.replica) ?? 0, state.viewer.sees_all),
    );
    for (const id of this.pictures.keys()) {
      if (!state.replicas.some((one) => one.replica === id)) this.pictures.delete(id);
    }
    loads(this.ids.loads, state.loads);
    errors(this.ids.errors, state.failures);
  }
}

function loads(id, list) {
  setText(byId(`${id}-count`), list.length ? whole(list.length) : "");
  keyed(
    byId(id),
    list.length ? list : [null],
    (one) => (one ? `${one.replica} ${one.digest} ${one.kind}` : ""),
    (one) => (one ? h("li", {}, adapterLink(one.adapter), h("span", { class: "what" }), h("span", { class: "at" })) : nothing("Nothing is being loaded.")),
    (node, one) => {
      if (!one) return;
      const [, what, at] = node.children;
      setText(what, KINDS[one.kind] ?? one.kind);
      setText(at, one.since_s ? `${shortReplica(one.replica)}, since ${clock(one.since_s)}` : shortReplica(one.replica));
    },
  );
}

function errors(id, list) {
  setText(byId(`${id}-count`), list.length ? whole(list.length) : "");
  keyed(
    byId(id),
    list.length ? list : [null],
    (one) => (one ? `${one.replica} ${one.adapter} ${one.code} ${one.tenant}` : ""),
    (one) =>
      one
        ? h("li", {}, h("time", { class: "at" }), h("code", {}, one.code), one.adapter ? adapterLink(one.adapter) : null, h("span", { class: "times" }), h("span", { class: "what" }))
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

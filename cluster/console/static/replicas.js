// Replicas as pictures, with their loads in progress and their recent errors.

import { adapterLink } from "./addresses.js";
import { byId, h, keyed, setText } from "./dom.js";
import { clock, shortReplica, whole } from "./format.js";
import { Picture } from "./picture.js";

const KINDS = {
  load: "reading on command",
  pin: "filling a slot to pin it",
  unpin: "releasing a slot",
  drop: "dropping it once its requests end",
  read: "reading; requests are waiting",
  fill: "waiting for a slot",
};

export class Replicas {
  /** The arguments are the ids of three lists of the page. The ids of the last two lists' counts end in "-count". */
  constructor(replicas, loads, errors) {
    this.ids = { replicas, loads, errors };
    this.pictures = new Map();
    this.last = null;
    new ResizeObserver(() => this.last && this.draw(this.last)).observe(byId(replicas));
  }

  draw(state) {
    this.last = state;
    const coming = new Map();
    for (const load of state.loads) coming.set(load.replica, (coming.get(load.replica) ?? 0) + 1);
    keyed(
      byId(this.ids.replicas),
      state.replicas,
      (replica) => replica.replica,
      (replica) => {
        const picture = new Picture();
        this.pictures.set(replica.replica, picture);
        return picture.node;
      },
      (_, replica) => this.pictures.get(replica.replica).draw(replica, state.names, coming.get(replica.replica) ?? 0, state.viewer.sees_all),
    );
    for (const id of this.pictures.keys()) {
      if (!state.replicas.some((replica) => replica.replica === id)) this.pictures.delete(id);
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
    (load) => (load ? `${load.replica} ${load.digest} ${load.kind}` : ""),
    (load) => (load ? h("li", {}, adapterLink(load.adapter), h("span", { class: "what" }), h("span", { class: "at" })) : nothing("Nothing is being loaded.")),
    (node, load) => {
      if (!load) return;
      const [, what, since] = node.children;
      setText(what, KINDS[load.kind] ?? load.kind);
      setText(since, load.since_s ? `${shortReplica(load.replica)}, since ${clock(load.since_s)}` : shortReplica(load.replica));
    },
  );
}

function errors(id, list) {
  setText(byId(`${id}-count`), list.length ? whole(list.length) : "");
  keyed(
    byId(id),
    list.length ? list : [null],
    (error) => (error ? `${error.replica} ${error.adapter} ${error.code} ${error.tenant}` : ""),
    (error) =>
      error
        ? h("li", {}, h("time", { class: "at" }), h("code", {}, error.code), error.adapter ? adapterLink(error.adapter) : null, h("span", { class: "times" }), h("span", { class: "what" }))
        : nothing("No errors since the replicas started."),
    (node, error) => {
      if (!error) return;
      setText(node.querySelector("time"), `${clock(error.at_s)} ${shortReplica(error.replica)}`);
      setText(node.querySelector(".times"), error.count > 1 ? `× ${whole(error.count)}` : "");
      setText(node.querySelector(".what"), error.message);
    },
  );
}

const nothing = (words) => h("li", { class: "none" }, words);

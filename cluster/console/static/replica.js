// One replica at an address of its own: its slots, loads, errors and traffic.

import { byId, setText } from "./dom.js";
import { Replicas } from "./replicas.js";
import { Traffic } from "./traffic.js";

export function makeReplica() {
  const replicas = new Replicas("replica-picture", "replica-loads", "replica-errors");
  const traffic = new Traffic(byId("replica-traffic"));
  let id = null;

  /** Switches to another replica and hides the data of the one before. */
  function show(wanted) {
    if (wanted === id) return;
    id = wanted;
    setText(byId("replica-title"), `Replica ${id}`);
    byId("replica-found").hidden = true;
    setText(byId("replica-missing"), "Loading");
    byId("replica-missing").hidden = false;
  }

  function draw(state) {
    const found = state.replicas.filter((replica) => replica.replica === id);
    byId("replica-found").hidden = !found.length;
    byId("replica-missing").hidden = found.length > 0;
    setText(byId("replica-missing"), `There is no replica ${id} now. A replica gets a new id when it restarts.`);
    if (!found.length) return;
    const here = (entry) => entry.replica === id;
    replicas.draw({ ...state, replicas: found, loads: state.loads.filter(here), failures: state.failures.filter(here) });
    traffic.draw(state, "This replica does not answer the console, so its traffic is not known.");
  }
  return { show, draw };
}

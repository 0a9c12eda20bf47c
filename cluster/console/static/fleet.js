// The fleet: totals, its replicas page by page, and the traffic of all of them.

import { byId, h, keyed, setText } from "./dom.js";
import { percent, rate, seconds, whole } from "./format.js";
import { Pager } from "./pager.js";
import { Replicas } from "./replicas.js";
import { Traffic } from "./traffic.js";

export function makeFleet({ pageReplicas }) {
  const pager = new Pager(byId("replica-pager"), "replicas", pageReplicas);
  const replicas = new Replicas("replicas", "loads", "errors");
  const traffic = new Traffic(byId("fleet-traffic"));

  function draw(state) {
    tiles(state);
    pager.show(state.last_replica, state.more_replicas);
    replicas.draw(state);
    traffic.draw(state, "No replica has reported its traffic yet.");
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
    ...(total.accepted_drafts === null ? [] : [["Accepted drafts", percent(total.accepted_drafts)]]),
    ...(load === null
      ? []
      : [
          ["Running", `${whole(load.num_running)} of ${whole(load.max_num_seqs)}`],
          ["Waiting", whole(load.num_waiting)],
          ["KV cache", percent(load.kv_used)],
          ["Adapter memory", percent(load.lora_memory_used)],
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

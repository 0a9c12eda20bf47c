"""A program for tests: a Ray cluster of three nodes on this machine and the application on it.

Says "ready" when it answers. Each line that it reads is an order, answered by a line of JSON: "node" ends one of the
nodes, "push NAME FOLDER" pushes the folder's adapter as tensors, as a trainer in the cluster does, "scale N" sets the
number of replicas, "residency" asks the directory which replica holds which adapter. Ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from lorafleet.cluster import serve_environment

OBJECT_STORE_BYTES = 80 << 20  # Ray's least


def main(run_dir: str, port: int, arguments: str) -> None:
    """arguments: of the application, in JSON."""
    os.environ["LORAFLEET_RUN_DIR"] = run_dir
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints a line when a node goes
    # Without HAProxy: its replicas' ports are counted by node, and these nodes are one machine.
    serve_environment.prepare(run_dir, direct_streaming=False)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client
    from safetensors.torch import load_file

    from lorafleet.cluster.admin import get_directory
    from lorafleet.cluster.app import build
    from lorafleet.cluster.config import parse_args

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 6, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
    )
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    serve.run(
        build(parse_args(json.loads(arguments))), name="lorafleet", route_prefix="/", external_scaler_enabled=True
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        answer: object = "done"
        match line.split():
            case ["node"]:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            case ["push", name, folder]:
                weights = load_file(f"{folder}/adapter_model.safetensors")
                config = json.loads((Path(folder) / "adapter_config.json").read_text())
                get_directory().push_tensors(name, weights, config, num_replicas=2)
            case ["scale", count]:  # what Serve's dashboard does for an external scaler
                controller = _get_global_client()._controller
                replicas = DeploymentID("EngineReplica", "lorafleet")
                ray.get(controller.update_deployment_replicas.remote(replicas, int(count)))
            case ["residency"]:
                answer = ray.get(get_directory()._actor.call.remote("routes", "", -1)).tiers
        print(json.dumps(answer), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

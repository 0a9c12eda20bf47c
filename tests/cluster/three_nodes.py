"""A program for tests: a Ray cluster of three nodes on this machine, of which two say that they have GPUs, and the
application on it, deployed from a shipped file.

Says "started" when Ray is there, "ready" when the application answers. Each line that it reads is an order, answered by
a line of JSON: "node" ends one of the nodes, "push NAME FOLDER" pushes the folder's adapter as tensors, as a trainer in
the cluster does, "scale N" sets the number of replicas, "running" says how many run, "residency" asks the directory
which replica holds which adapter, "place TP" says which nodes Ray gives to the file's replicas, of so many GPUs each.
Ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from lorafleet.cluster.serve import serve_environment

OBJECT_STORE_BYTES = 80 << 20  # Ray's least
NODE_GPUS = 2  # of each but the head: declared, not there
FILE = Path(__file__).parents[2] / "configs" / "serve-cluster-folder.yaml"


def main(run_dir: str, port: int, arguments: str, head_cpus: int) -> None:
    """arguments: of the application, in JSON, in place of the file's. Each node has a cache of its own in run_dir."""
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
    from ray.serve.schema import ServeDeploySchema
    from safetensors.torch import load_file

    from lorafleet.cluster.admin.admin_handle import get_directory
    from lorafleet.cluster.directory.directory_calls import RoutesCall

    file = yaml.safe_load(FILE.read_text())
    shipped = file["applications"][0]["args"]
    file["applications"][0] |= {"args": json.loads(arguments), "external_scaler_enabled": True}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": head_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
    )
    nodes = [
        cluster.add_node(
            num_cpus=2,
            num_gpus=NODE_GPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={"XDG_CACHE_HOME": f"{run_dir}/cache{i}"},
        )
        for i in range(2)
    ]
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    print("started", file=answers, flush=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(file))
    while (application := serve.status().applications["lorafleet"]).status != "RUNNING":
        assert application.status == "DEPLOYING", application.message
        time.sleep(0.2)
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
            case ["running"]:
                states = serve.status().applications["lorafleet"].deployments["EngineReplica"].replica_states
                answer = states.get("RUNNING", 0)
            case ["residency"]:
                answer = ray.get(get_directory()._actor.ask.remote(RoutesCall("", -1))).tiers
            case ["place", size]:
                answer = place(shipped | {"tensor_parallel_size": int(size)})
        print(json.dumps(answer), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def place(args: dict[str, Any]) -> list[list[int]]:
    """For each replica the GPUs that its nodes say they have."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from lorafleet.cluster.config import parse_args
    from lorafleet.cluster.serve.resources import replica_bundles

    parsed = parse_args(args | {"num_cpus": 0.1})  # the nodes' CPUs are the running replicas'
    groups = [
        placement_group(replica_bundles(parsed, "cuda"), strategy="STRICT_PACK") for _ in range(parsed.num_replicas)
    ]
    ray.get([group.ready() for group in groups])
    num_gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes()}
    nodes = [set(placement_group_table(group)["bundles_to_node_id"].values()) for group in groups]
    for group in groups:
        remove_placement_group(group)
    return [[num_gpus[node] for node in one] for one in nodes]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

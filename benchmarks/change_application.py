"""Changes the application of a `lorafleet serve` that runs on this machine, as `serve deploy` and a scaler do.

    python benchmarks/change_application.py PID replace     # replaces all replicas, one after another
    python benchmarks/change_application.py PID scale 1     # afterwards: sets the number of replicas

It returns when Serve has done so. Serve sets the number of replicas for programs only if the application was deployed
so, which `replace` does. PID is the server's. benchmarks/chaos.py runs this under load.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

import psutil

APP, REPLICAS = "lorafleet", "EngineReplica"
RAYLET = "raylet/raylet"
GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")
MAX_REPLICAS = 64
DONE_S = 600.0  # Time within which all replicas must be as ordered; draining ones may still answer.
POLL_S = 0.2


def find_raylet(pid: int) -> psutil.Process:
    """Returns the raylet of the server with this process ID. Raises SystemExit if there is none."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if any(RAYLET in word for word in process.cmdline()[:1]):
                return process
        except psutil.Error:
            continue
    sys.exit(f"the process {pid} has no raylet below it; give the process ID of a running `lorafleet serve`")


def gcs_address(command_line: list[str]) -> str:
    """Returns the address of Ray's GCS from a raylet's command line."""
    found = GCS_ADDRESS.search(" ".join(command_line))
    if found is None:
        sys.exit(f"the raylet's command line has no --gcs-address: {command_line}")
    return found[1]


def connect(pid: int) -> None:
    """Connects to the server's own Ray, with its settings and its token, which Serve reads from the environment."""
    raylet = find_raylet(pid)
    os.environ.update(raylet.environ())
    import ray

    ray.init(gcs_address(raylet.cmdline()), namespace="serve", log_to_driver=False, logging_level="ERROR")


def replace() -> None:
    """Deploys the application again, with the same settings."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from lorafleet.cluster.serve.app import build

    info, _ = _get_global_client().get_deployment_info(REPLICAS, APP)
    target = serve.RunTarget(build(info.replica_config.init_args[0]), APP, "/", external_scaler_enabled=True)
    serve.run_many([target])


def scale(count: int) -> None:
    """Sets the number of replicas, and waits until as many run and no other starts or stops."""
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(REPLICAS, APP), count))
    deadline_s = time.monotonic() + DONE_S
    while (states := serve.status().applications[APP].deployments[REPLICAS].replica_states) != {"RUNNING": count}:
        if time.monotonic() > deadline_s:
            sys.exit(f"after {DONE_S:.0f} s the replicas are {states}, not {count} that run")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("change", choices=("replace", "scale"))
    parser.add_argument("count", type=int, nargs="?", help=f"number of replicas, 1 to {MAX_REPLICAS}")
    args = parser.parse_args()
    if (args.change == "scale") != (args.count is not None):
        parser.error("`scale` has a number of replicas, and `replace` has none")
    if args.count is not None and not 1 <= args.count <= MAX_REPLICAS:
        parser.error(f"{args.count} replicas: give 1 to {MAX_REPLICAS}")
    connect(args.pid)
    if args.count is None:
        replace()
    else:
        scale(args.count)


if __name__ == "__main__":
    main()

"""Changes the application of a `lorafleet serve` that runs on this machine, as `serve deploy` and a scaler do.

    python benchmarks/change_application.py PID replace                      # all replicas, one after another
    python benchmarks/change_application.py PID replace max_model_len=4096   # by replicas with another option
    python benchmarks/change_application.py PID scale 1                      # afterwards: the number of replicas

It returns when Serve has done so. Serve sets the number of replicas for programs only if the application was deployed
so, which `replace` does. PID is the server's. benchmarks/chaos.py runs this under load.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

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

    ray.init(gcs_address(raylet.cmdline()), namespace="serve", log_to_driver=False, logging_level=logging.ERROR)


def replace(changes: dict[str, Any]) -> None:
    """Deploys the application again, with its settings and these changes."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from lorafleet.cluster.config import parse_args
    from lorafleet.cluster.serve.app import build

    info, _ = _get_global_client().get_deployment_info(REPLICAS, APP)
    args = info.replica_config.init_args[0]
    changed = parse_args({"model": args.model} | changes)
    args = args.model_copy(update={name: getattr(changed, name) for name in changes})
    serve.run_many([serve.RunTarget(build(args), APP, "/", external_scaler_enabled=True)])


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
    parser.add_argument("words", nargs="*", help=f"OPTION=VALUE …, or the number of replicas, 1 to {MAX_REPLICAS}")
    args = parser.parse_args()
    if args.change == "replace":
        changes = parse_changes(args.words)
        connect(args.pid)
        replace(changes)
    else:
        count = parse_count(args.words)
        connect(args.pid)
        scale(count)


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """Returns the options with their values, which are in JSON or else text. Raises SystemExit for other words."""
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            sys.exit(f"{word!r} is no OPTION=VALUE")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return changes


def parse_count(words: Sequence[str]) -> int:
    """Returns the number of replicas. Raises SystemExit if it is none from 1 to MAX_REPLICAS."""
    if len(words) != 1 or not words[0].isdecimal() or not 1 <= int(words[0]) <= MAX_REPLICAS:
        sys.exit(f"`scale` has one number of replicas, 1 to {MAX_REPLICAS}, not {' '.join(words)!r}")
    return int(words[0])


if __name__ == "__main__":
    main()

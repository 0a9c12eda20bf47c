"""Changes the application of a `lorafleet serve` that runs on this machine, as a changed file and a scaler do.

    python benchmarks/change_application.py PID replace                      # with the options that it has
    python benchmarks/change_application.py PID replace max_model_len=4096   # by replicas with another option
    python benchmarks/change_application.py PID scale 1                      # afterwards: the number of replicas

It returns when Serve has done so, or fails with Serve's message. `replace` writes the changed options to a file as they
are, and deploys it by `serve run`. Serve sets the number of replicas for programs only if the application was deployed
so, which `replace` does. PID is the server's. benchmarks/chaos.py runs this under load.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

APP, REPLICAS = "lorafleet", "EngineReplica"
BUILDER = "lorafleet.cluster.serve.app:build"
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
    os.environ["RAY_ADDRESS"] = gcs_address(raylet.cmdline())  # For `serve run`.
    import ray

    ray.init(os.environ["RAY_ADDRESS"], namespace="serve", log_to_driver=False, logging_level=logging.ERROR)


def replace(changes: dict[str, Any]) -> None:
    """Deploys the application from a file, by `serve run`, with the options that were deployed last and these changes.
    Waits until the application runs. Raises SystemExit with Serve's message if it cannot be deployed."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    info, _ = client.get_deployment_info(REPLICAS, APP)
    args = info.replica_config.init_args[0]
    before_s = _deployed_s(client)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "changed.yaml"
        file.write_text(json.dumps(serve_file(args.model_dump(mode="json", exclude_unset=True) | changes)))
        program = Path(sys.executable).with_name("serve")
        subprocess.run([program, "run", "--non-blocking", file], check=True)
    wait_until_deployed(client, before_s)


def serve_file(args: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a file for Ray Serve that deploys the application with these options."""
    application = {"name": APP, "route_prefix": "/", "import_path": BUILDER, "args": args}
    return {"applications": [application | {"external_scaler_enabled": True}]}


def _deployed_s(client: Any) -> float:
    deployed_s: float = client.get_serve_status(APP).app_status.deployment_timestamp
    return deployed_s


def wait_until_deployed(client: Any, before_s: float) -> None:
    """Waits until what was deployed after `before_s` runs. Raises SystemExit with Serve's message if it failed."""
    deadline_s = time.monotonic() + DONE_S
    while True:
        overview = client.get_serve_status(APP)
        status = overview.app_status
        if status.deployment_timestamp > before_s:
            if status.status == "RUNNING":
                return
            if status.status == "DEPLOY_FAILED":
                causes = [deployment.message for deployment in overview.deployment_statuses]
                sys.exit("\n".join(["Serve could not deploy the application:", status.message, *causes]))
        if time.monotonic() > deadline_s:
            sys.exit(f"after {DONE_S:.0f} s the application is {status.status}: {status.message}")
        time.sleep(POLL_S)


def scale(count: int) -> None:
    """Sets the number of replicas, and waits until as many run and no other starts or stops."""
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    controller = client._controller
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

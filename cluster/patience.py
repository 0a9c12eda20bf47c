"""Lets Ray and Serve take longer to start than the limits that they have as constants: 30 s for the raylet, and 60 s
for Serve's proxies. Limits that are settings are in cluster/serve/serve_environment.py.

Starting again would be no remedy on a busy machine: every attempt begins from zero, and is load itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lorafleet.cluster.serve.child_processes import descendants
from lorafleet.cluster.serve.serve_environment import START_S

REPORT_S = 10.0  # Seconds after which the person who waits is told for what.
POLL_S = 0.2
RAYLET = b"raylet/raylet"


@contextlib.contextmanager
def patient_start(wait_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Makes ray.init() wait so many seconds for the raylet to register, unless the raylet ends. `report` gets one line
    if that takes long."""
    from ray._private import services

    get_node: Any = services.get_node

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        return wait_for(lambda: get_node(gcs_address, node_id), wait_s, _raylet_runs, report)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


def wait_for(
    get_node: Callable[[], Any],
    wait_s: float,
    raylet_runs: Callable[[], bool],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Returns the node once the raylet has registered it. Raises RuntimeError, as get_node() does until then, after
    wait_s seconds, or when the raylet has ended."""
    began_s, reported = clock(), False
    while True:
        try:
            return get_node()
        except RuntimeError:
            waited_s = clock() - began_s
            if waited_s > wait_s or not raylet_runs():
                sleep(POLL_S)  # Ray asks again at once.
                raise
        if waited_s > REPORT_S and not reported:
            reported = True
            load, cores = os.getloadavg()[0], os.cpu_count()
            report(
                f"waiting for Ray's raylet, for at most {wait_s:.0f} s: this machine is busy (load {load:.0f} on "
                f"{cores} cores)"
            )
        sleep(POLL_S)


def wait_for_proxies_patiently() -> None:
    """Makes serve.start() wait START_S seconds for Serve's proxies."""
    from ray.serve._private import api, client

    for module in (api, client):
        vars(module)["HTTP_PROXY_TIMEOUT"] = START_S


def _raylet_runs() -> bool:
    return any(RAYLET in _first_word(pid) for pid in descendants(os.getpid()))


def _first_word(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return b""

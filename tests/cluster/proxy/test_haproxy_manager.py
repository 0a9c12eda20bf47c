"""When the manager of HAProxy ends a HAProxy that does not answer, and which applications it passes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import warnings
from typing import Any

import pytest

from lorafleet.cluster.proxy.haproxy import EXPECTED_VARIABLE
from lorafleet.cluster.proxy.replica_gaps import ReplicaGaps
from lorafleet.cluster.proxy.waiting_room import EXPECTED_S
from tests.cluster.haproxies import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve._private.common import RequestProtocol
    from ray.serve.schema import Target, TargetGroup

    from lorafleet.cluster.proxy.haproxy_manager import MAX_IDLE, MAX_UNANSWERED, Activity, WatchedHAProxyManager

SLEEP = "import time; time.sleep(3600)"
COMPUTE = "while True: pass"


class SilentHAProxy:
    """Serve's handle of a HAProxy. It answers as often as `answers` says, and then never again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._proc = process
        self.answers = 0
        self.num_started = 0

    async def _send_socket_command(self, _: str) -> str:
        if self.answers:
            self.answers -= 1
            return "# pxname,svname\n"
        raise RuntimeError("Timeout while sending a command")

    async def _start_and_wait_for_haproxy(self) -> asyncio.subprocess.Process:
        self.num_started += 1
        return self._proc


def manager_of(haproxy: SilentHAProxy) -> Any:
    manager = WatchedHAProxyManager.__new__(WatchedHAProxyManager)
    manager._haproxy, manager._reload_lock = haproxy, asyncio.Lock()
    manager._forget()
    return manager


async def started(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code)


async def test_haproxy_is_replaced_when_it_has_neither_answered_nor_run_for_several_looks() -> None:
    process = await started(SLEEP)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_still(process.pid))
    haproxy = SilentHAProxy(process)
    manager = manager_of(haproxy)
    for _ in range(MAX_IDLE):  # The first shows how much it has run so far.
        await manager._look()
    assert haproxy.num_started == 0
    haproxy.answers = 1
    for _ in range(1 + MAX_IDLE):
        await manager._look()
    assert haproxy.num_started == 0, "an answer between them has begun the count anew"
    await manager._look()
    assert haproxy.num_started == 1
    assert await process.wait() == -signal.SIGKILL


async def test_haproxy_that_runs_without_an_answer_is_given_more_time() -> None:
    process = await started(COMPUTE)
    haproxy = SilentHAProxy(process)
    manager = manager_of(haproxy)
    for _ in range(MAX_UNANSWERED - 1):
        before = Activity.of(process.pid)
        wait_until(lambda before=before: Activity.of(process.pid) != before)
        await manager._look()
    assert haproxy.num_started == 0 and process.returncode is None
    await manager._look()
    assert haproxy.num_started == 1


async def test_haproxy_that_has_ended_is_replaced_at_once() -> None:
    process = await started("")
    await process.wait()
    haproxy = SilentHAProxy(process)
    await manager_of(haproxy)._look()
    assert haproxy.num_started == 1


def test_an_application_without_a_replica_is_left_out_only_if_it_is_being_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def group(app: str, ingress: str, *targets: Target) -> TargetGroup:
        named = {"app_name": app, "ingress_deployment_name": ingress, "route_prefix": f"/{app}"}
        return TargetGroup(protocol=RequestProtocol.HTTP, targets=list(targets), **named)

    monkeypatch.setenv(EXPECTED_VARIABLE, "1")  # It is restored at the end.
    manager = WatchedHAProxyManager.__new__(WatchedHAProxyManager)
    manager._gaps, manager._schedule_haproxy_update = ReplicaGaps(), lambda: None
    replica = Target(ip="127.0.0.1", port=1, instance_id="", name="r")
    manager.update_target_groups(
        [group("runs", "EngineReplica", replica), group("is replaced", "EngineReplica"), group("is deleted", "")]
    )
    assert [one.app_name for one in manager.get_target_groups()] == ["runs", "is replaced"]
    assert os.environ[EXPECTED_VARIABLE] == str(EXPECTED_S)


def test_a_process_that_has_ended_shows_no_activity() -> None:
    assert Activity.of(2**22 + 1) == Activity(0, 0, 0)


def is_still(pid: int) -> bool:
    before = Activity.of(pid)
    time.sleep(0.05)
    return Activity.of(pid) == before

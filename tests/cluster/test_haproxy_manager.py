"""When the manager of HAProxy ends a HAProxy that does not answer at its admin socket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from lorafleet.cluster import haproxy_manager
    from lorafleet.cluster.haproxy_manager import (
        MAX_UNANSWERED,
        MAX_UNANSWERED_RUNNABLE,
        WatchedHAProxyManager,
        is_runnable,
    )

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
    manager._haproxy, manager._reload_lock, manager._unanswered = haproxy, asyncio.Lock(), 0
    return manager


async def started(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code)


async def test_haproxy_is_replaced_when_it_has_not_answered_several_times_in_a_row() -> None:
    process = await started(SLEEP)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: not is_runnable(process.pid))
    haproxy = SilentHAProxy(process)
    manager = manager_of(haproxy)
    for _ in range(MAX_UNANSWERED - 1):
        await manager._look()
    assert haproxy.num_started == 0
    haproxy.answers = 1
    for _ in range(MAX_UNANSWERED):
        await manager._look()
    assert haproxy.num_started == 0, "an answer between them has begun the count anew"
    await manager._look()
    assert haproxy.num_started == 1
    assert await process.wait() == -signal.SIGKILL


async def test_haproxy_that_waits_for_a_processor_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await started(COMPUTE)
    wait_until(lambda: is_runnable(process.pid))
    monkeypatch.setattr(haproxy_manager, "is_runnable", lambda pid: pid == process.pid)
    haproxy = SilentHAProxy(process)
    manager = manager_of(haproxy)
    for _ in range(MAX_UNANSWERED_RUNNABLE - 1):
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


@pytest.fixture
def sleeping() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process.pid
        process.kill()


def test_a_process_that_sleeps_or_has_ended_is_not_runnable(sleeping: int) -> None:
    wait_until(lambda: not is_runnable(sleeping))
    assert not is_runnable(2**22 + 1)


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    deadline_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

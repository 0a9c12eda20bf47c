"""The order in which a receiver's process does its jobs, and what becomes of it when one fails."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorafleet.cluster.admin.push_intake import PushIntake, taking_in
from lorafleet.cluster.catalogue.catalogue_store import open_store
from lorafleet.cluster.receiving.receiver_messages import ReceiverReport, report
from lorafleet.cluster.receiving.receiver_process import ReceiverFailed, ReceiverProcess
from lorafleet.cluster.receiving.update_groups import UpdateGroups
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush, read_announced
from lorafleet.protocol.errors import BodyTimeout
from lorafleet.protocol.framing import receive
from lorafleet.sandbox.process import RunningProgram

PUSH = AnnouncedPush(b"{}", read_announced([{"name": "a", "dtype": "float32", "shape": [2]}]))
WAIT_S = 60.0


@dataclass
class Receiving:
    process: ReceiverProcess
    program: socket.socket  # The program's end of the socket, for which the test answers.
    intake: PushIntake

    async def begin(self) -> asyncio.Task[None]:
        """Begins a push. Returns once the program has the job."""
        task = asyncio.create_task(self.process.receive(PUSH, self.intake, WAIT_S))
        assert await asyncio.to_thread(receive, self.program)
        return task


def waiting_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@pytest.fixture
async def receiving(tmp_path: Path) -> AsyncIterator[Receiving]:
    ours, theirs = socket.socketpair()
    child = waiting_child()
    process = ReceiverProcess(RunningProgram(child, ours))
    store = open_store(str(tmp_path))
    with theirs, ThreadPoolExecutor(2) as pool:
        async with taking_in(PUSH.config, PUSH.file.num_bytes, store, pool) as intake:
            yield Receiving(process, theirs, intake)
        await process.end()
    assert child.stdin is not None
    child.stdin.close()


async def test_a_push_that_gives_up_before_its_turn_does_not_harm_the_one_before_it(receiving: Receiving) -> None:
    first = await receiving.begin()
    with pytest.raises(ReceiverFailed, match="the pushes before it took longer"):
        await receiving.process.receive(PUSH, receiving.intake, 0.01)
    canceled = asyncio.create_task(receiving.process.receive(PUSH, receiving.intake, WAIT_S))
    await asyncio.sleep(0)
    canceled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await canceled
    assert receiving.process.is_alive and not first.done()
    report(receiving.program, ReceiverReport(has_ended=True))
    await first
    assert receiving.process.is_alive


async def test_a_push_that_gives_up_in_its_turn_ends_the_process(receiving: Receiving) -> None:
    first = await receiving.begin()
    waiting = asyncio.create_task(receiving.process.receive(PUSH, receiving.intake, WAIT_S))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ReceiverFailed, match="its process has ended"):
        await waiting
    assert not receiving.process.is_alive


async def test_a_push_to_a_group_that_has_just_ended_is_answered(receiving: Receiving) -> None:
    with pytest.raises(BodyTimeout, match="'gone' has ended"):
        await UpdateGroups((), "cpu").receive("gone", PUSH, receiving.intake, WAIT_S)

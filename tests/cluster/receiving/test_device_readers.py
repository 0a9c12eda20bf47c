"""Pushes out of shared memory, by real processes that copy them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lorafleet.cluster.admin.push_intake import PushIntake, taking_in
from lorafleet.cluster.catalogue.catalogue_store import open_store
from lorafleet.cluster.receiving.device_readers import DeviceReaders
from lorafleet.cluster.receiving.receiver_process import ReceiverProcess
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush, read_announced
from lorafleet.protocol.errors import InvalidRequest, Overloaded
from lorafleet.protocol.shared_segment import SharedSegment

FILE = read_announced([{"name": "a", "dtype": "float32", "shape": [2]}])


def push_of(segment: str) -> AnnouncedPush:
    return AnnouncedPush(b"{}", FILE, segment.encode().hex())


@pytest.fixture
async def intakes(tmp_path: Path) -> AsyncIterator[list[PushIntake]]:
    store = open_store(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        async with AsyncExitStack() as stack:
            opened = [taking_in(b"{}", FILE.num_bytes, store, pool) for _ in range(3)]
            yield [await stack.enter_async_context(intake) for intake in opened]


async def test_a_push_that_fails_does_not_harm_those_behind_it(intakes: list[PushIntake]) -> None:
    readers, segment = DeviceReaders("cpu"), SharedSegment(8)
    segment.content[:] = b"weights!"
    pushes = [push_of(f"lorafleet-{'0' * 32}"), push_of(segment.name), push_of(segment.name)]
    try:
        jobs = (readers.receive("cpu", push, intake) for push, intake in zip(pushes, intakes, strict=True))
        failed, *others = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await readers.close()
        segment.close()
    with pytest.raises(Overloaded, match="stopping"):
        await readers.receive("cpu", pushes[1], intakes[1])
    assert isinstance(failed, InvalidRequest) and "cannot be opened" in failed.message
    assert others == [None, None]
    contents = [await asyncio.to_thread(Path(intake.path).read_bytes) for intake in intakes]
    assert [b"weights!" in content for content in contents] == [False, True, True]


async def test_a_process_that_starts_while_the_replica_stops_is_ended(
    intakes: list[PushIntake], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, start, started = DeviceReaders("cpu"), ReceiverProcess.start, list[ReceiverProcess]()

    async def start_late(module: str, settings: Mapping[str, object], visible_devices: str) -> ReceiverProcess:
        started.append(await start(module, settings, visible_devices))
        await readers.close()
        return started[0]

    monkeypatch.setattr(ReceiverProcess, "start", start_late)
    with pytest.raises(Overloaded, match="stopping"):
        await readers.receive("cpu", push_of(f"lorafleet-{'0' * 32}"), intakes[0])
    assert not started[0].is_alive

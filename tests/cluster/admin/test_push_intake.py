"""The work on a push's bytes while they arrive: digest, checksums, files, and what a fault leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from lorafleet.cluster.admin.following import STEP_BYTES, ByteFollower
from lorafleet.cluster.admin.push_intake import taking_in
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.s3_store import S3Store
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.adapter_formats.tensor_push import TensorSums
from lorafleet.protocol.errors import AdapterMalformed, StoreError
from memory_s3 import MemoryS3

CONFIG = b'{"r": 8}'


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def left(store: FolderStore) -> list[Path]:
    return list((Path(store.uri) / "aside").iterdir())


async def test_content_is_hashed_stored_and_shared(store: FolderStore, pool: ThreadPoolExecutor) -> None:
    weights = save({"a": torch.arange(1.5 * STEP_BYTES / 4), "b": torch.ones(3)})
    async with taking_in(CONFIG, len(weights), store, pool, TensorSums(len(weights))) as intake:
        for start in range(0, len(weights), 1 << 20):
            intake.add(weights[start : start + (1 << 20)])
        assert sorted(await intake.content.sums()) == ["a", "b"]
        digest = await intake.content.digest()
        await intake.content.written()
        assert not store.has_files(digest)
        content = map_sealed(await intake.seal())
        intake.content.publish(digest)
    assert folder_digest(Path(store.files_uri(digest))) == digest
    assert content is not None and (content.config, bytes(content.weights)) == (CONFIG, weights)
    assert not left(store)


async def test_an_upload_that_ends_early_leaves_nothing(store: FolderStore, pool: ThreadPoolExecutor) -> None:
    async with taking_in(CONFIG, 3 * STEP_BYTES, store, pool) as intake:
        intake.add(bytes(2 * STEP_BYTES))
    assert not left(store) and not store.stored_digests()


async def test_a_malformed_header_is_reported_when_all_has_arrived(
    store: FolderStore, pool: ThreadPoolExecutor
) -> None:
    async with taking_in(CONFIG, 16, store, pool, TensorSums(16)) as intake:
        intake.add(b"\xff" * 16)
        with pytest.raises(AdapterMalformed):
            await intake.content.sums()


async def test_a_fault_of_the_disk_is_the_store_s_error(store: FolderStore, pool: ThreadPoolExecutor) -> None:
    async with taking_in(CONFIG, STEP_BYTES, store, pool) as intake:
        left(store)[0].rmdir()
        intake.add(bytes(STEP_BYTES))
        with pytest.raises(StoreError, match="No such file"):
            await intake.content.written()
        await intake.content.digest()


async def test_files_in_s3_are_uploaded_from_their_parts(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    store = S3Store("s3://bucket/p", MemoryS3)
    weights = save({"a": torch.arange(1.5 * STEP_BYTES / 4)})
    async with taking_in(CONFIG, len(weights), store, pool) as intake:
        intake.add(weights)
        digest = await intake.content.digest()
        await intake.content.written()
        intake.content.publish(digest)
    assert store.has_files(digest)
    store.fetch_files(digest, tmp_path)
    assert folder_digest(tmp_path) == digest


async def test_steps_follow_in_order_and_end_before_stop_returns(pool: ThreadPoolExecutor) -> None:
    steps: list[tuple[int, int]] = []
    may_go_on = threading.Event()

    def follow(start: int, end: int) -> None:
        may_go_on.wait()
        steps.append((start, end))

    follower = ByteFollower(pool, follow, 3 * STEP_BYTES)
    follower.advance(STEP_BYTES - 1)
    follower.advance(2 * STEP_BYTES + 1)
    stopping = asyncio.create_task(follower.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    may_go_on.set()
    await stopping
    assert steps == [(0, STEP_BYTES)]
    follower.advance(3 * STEP_BYTES)
    assert steps == [(0, STEP_BYTES)]


async def test_bytes_that_come_after_an_error_are_not_followed(pool: ThreadPoolExecutor) -> None:
    calls: list[int] = []

    def follow(start: int, _: int) -> None:
        calls.append(start)
        raise ValueError("broken")

    follower = ByteFollower(pool, follow, 2 * STEP_BYTES)
    follower.advance(STEP_BYTES)
    with pytest.raises(ValueError, match="broken"):
        await follower.done()
    follower.advance(2 * STEP_BYTES)
    await follower.stop()
    assert calls == [0]

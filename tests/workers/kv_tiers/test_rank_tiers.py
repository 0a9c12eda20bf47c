"""The tiers of one rank: blocks that leave the caches and come back, through host memory and through a file."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorafleet.kernels.decoder.block_copies import BlockCopies
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.kv_tiers import host_blocks
from lorafleet.workers.kv_tiers.block_movers import HostMover, StreamMover, cache_tensors
from lorafleet.workers.kv_tiers.block_names import ROOT, block_name
from lorafleet.workers.kv_tiers.disk_blocks import DamagedBlockError, DiskBlocks
from lorafleet.workers.kv_tiers.host_blocks import PAGE_BYTES, HostBlocks, slot_bytes
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.tp.rank_messages import BlocksMoved

CPU = torch.device("cpu")


def bytes_of(seed: int) -> bytes:
    return (
        torch.randint(256, (PAGE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        .numpy()
        .tobytes()
    )


def test_a_disk_returns_what_was_written_to_each_slot(tmp_path: Path) -> None:
    disk = DiskBlocks(tmp_path, 8, PAGE_BYTES)
    for slot in (3, 0, 7):
        disk.write(slot, memoryview(bytes_of(slot)))
    disk.write(3, memoryview(bytes_of(30)))
    for slot, seed in ((3, 30), (0, 0), (7, 7)):
        target = bytearray(PAGE_BYTES)
        disk.read(slot, memoryview(target))
        assert target == bytes_of(seed)
    assert os.fstat(disk.descriptor).st_size <= 8 * PAGE_BYTES
    assert list(tmp_path.iterdir()) == [], "the file has a name and would outlive its process"
    disk.close()


@pytest.mark.parametrize("damage", ["bit", "end", "never written"])
def test_a_damaged_slot_is_never_returned(tmp_path: Path, damage: str) -> None:
    disk = DiskBlocks(tmp_path, 4, PAGE_BYTES)
    if damage != "never written":
        disk.write(2, memoryview(bytes_of(2)))
    if damage == "bit":
        flipped = bytes([bytes_of(2)[100] ^ 8])
        os.pwrite(disk.descriptor, flipped, 2 * PAGE_BYTES + 100)
    elif damage == "end":
        os.ftruncate(disk.descriptor, 3 * PAGE_BYTES - 1)
    with pytest.raises(DamagedBlockError):
        disk.read(2, memoryview(bytearray(PAGE_BYTES)))
    disk.close()


def test_a_write_in_parts_is_whole_and_one_that_fails_is_not_read(tmp_path: Path) -> None:
    room = [5 * PAGE_BYTES]

    def write(descriptor: int, source: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.pwrite(descriptor, source[: min(1000, room[0])], offset)
        room[0] -= count
        return count

    disk = DiskBlocks(tmp_path, 8, PAGE_BYTES, write)
    for slot in range(5):
        disk.write(slot, memoryview(bytes_of(slot)))
    with pytest.raises(OSError, match="No space left"):
        disk.write(2, memoryview(bytes_of(20)))
    target = bytearray(PAGE_BYTES)
    disk.read(4, memoryview(target))
    assert target == bytes_of(4)
    with pytest.raises(DamagedBlockError):
        disk.read(2, memoryview(target))
    disk.close()


def test_a_folder_that_cannot_hold_the_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold KV blocks: No such file or directory"):
        DiskBlocks(tmp_path / "missing", 8, PAGE_BYTES)
    with pytest.raises(ConfigError, match="GiB of free space, less than"):
        DiskBlocks(tmp_path, 1 << 50, PAGE_BYTES)


def test_host_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be allocated"):
        HostBlocks(1 << 50, PAGE_BYTES, CPU)


def test_host_memory_is_unlocked_before_it_is_freed_though_nobody_has_closed_it(monkeypatch) -> None:
    """Else torch would take what lies there later for pinned memory, and its copies would not wait."""
    locked: set[int] = set()

    def lock(address: int, num_bytes: int, flags: int) -> int:  # noqa: ARG001  as CUDA's
        locked.add(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=locked.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 2 * PAGE_BYTES)
    host = HostBlocks(5, PAGE_BYTES, torch.device("cuda"))
    assert locked == {host.slot(first).data_ptr() for first in (0, 2, 4)}
    del host
    assert not locked


def test_names_depend_on_all_before_on_the_salt_and_on_the_tokens() -> None:
    tokens = list(range(16))
    first = block_name(ROOT, ("salt", "digest"), tokens)
    names = {
        first,
        block_name(first, ("salt", "digest"), tokens),
        block_name(ROOT, ("salt", "other"), tokens),
        block_name(ROOT, ("saltdigest", ""), tokens),
        block_name(ROOT, ("salt", "digest"), [*tokens[:15], 16]),
    }
    assert len(names) == 5
    assert block_name(ROOT, ("salt", "digest"), tokens) == first


def test_shared_caches_and_values_within_keys_are_stored_once() -> None:
    k, v, latent = torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 6), torch.zeros(4, 2, 1, 12)
    tensors = cache_tensors([(k, v), (latent, latent[..., :8]), (k, v)])
    assert [tensor.data_ptr() for tensor in tensors] == [k.data_ptr(), v.data_ptr(), latent.data_ptr()]


class Rank:
    """One rank's tiers over two random caches."""

    def __init__(self, folder: Path, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(1)
        self.caches = [torch.randn(40, 16, 2, 64).to(dtype).to(device) for _ in range(2)]
        copies = BlockCopies(self.caches)
        size = slot_bytes(copies.row_bytes)
        host = HostBlocks(8, size, device)
        mover = StreamMover(copies, host, device) if device.type == "cuda" else HostMover(copies, host)
        self.tiers = RankTiers(0, mover, host, DiskBlocks(folder, 8, size))
        self.answers: list[BlocksMoved] = []
        self._answered = threading.Semaphore(0)

    def answer(self, answer: BlocksMoved) -> None:
        self.answers.append(answer)
        self._answered.release()

    def await_answer(self) -> BlocksMoved:
        assert self._answered.acquire(timeout=60)
        return self.answers.pop(0)

    def await_load(self, load_id: int) -> None:
        found: list[int] = []
        while not found:
            found = self.tiers.take_loaded()
        assert found == [load_id]

    def go_round(self) -> None:
        """Brings blocks to the host tier, to disk, back to other slots and to other blocks, while later work overwrites
        them."""
        before = [cache.clone() for cache in self.caches]
        self.tiers.save([(3, 0), (10, 1), (39, 7)])
        for cache in self.caches:
            cache[[3, 10, 39]] = 0  # as a step that is launched later
        self.tiers.write(1, [(0, 4), (1, 0), (7, 2)], self.answer)
        assert self.await_answer() == BlocksMoved(0, 1)
        self.tiers.read(2, [(2, 5), (4, 6)], self.answer)
        assert self.await_answer() == BlocksMoved(0, 2)
        self.tiers.load(9, [(5, 39), (6, 3), (1, 10)])
        self.await_load(9)
        for cache, old in zip(self.caches, before, strict=True):
            assert torch.equal(cache, old)
        self.tiers.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    Rank(tmp_path, dtype=dtype).go_round()


def test_a_job_reports_the_blocks_that_failed_and_the_first_full_disk_ends_it(tmp_path: Path, monkeypatch) -> None:
    rank = Rank(tmp_path)
    assert rank.tiers.disk is not None
    rank.tiers.save([(0, 0), (1, 1)])
    rank.tiers.write(1, [(0, 0), (1, 1)], rank.answer)
    assert rank.await_answer() == BlocksMoved(0, 1)
    os.pwrite(rank.tiers.disk.descriptor, b"damage", rank.tiers.host.slot_bytes + 50)
    rank.tiers.read(2, [(0, 2), (1, 3)], rank.answer)
    answer = rank.await_answer()
    assert answer.failed == [1] and "checksum" in answer.fault

    def fail(_slot: int, _source: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rank.tiers.disk, "write", fail)
    rank.tiers.write(3, [(0, 4), (1, 5)], rank.answer)
    assert rank.await_answer() == BlocksMoved(0, 3, [0, 1], "No space left on device")
    rank.tiers.close()


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_blocks_come_back_bit_by_bit(self, tmp_path: Path, dtype: torch.dtype) -> None:
        Rank(tmp_path, torch.device("cuda"), dtype).go_round()

    def test_more_blocks_than_the_staging_area_holds(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("lorafleet.workers.kv_tiers.block_movers.STAGING_BYTES", 1)
        Rank(tmp_path, torch.device("cuda")).go_round()

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lorafleet.protocol.errors import LorafleetError
from lorafleet.workers.slots import pinned_memory
from lorafleet.workers.slots.pinned_memory import MAX_FREE_BLOCKS, PIECE_BYTES, PinnedMemory

MB = 1 << 20
LONG = 400_000_000  # cycles of a kernel that does nothing, about 0.2 s


def test_a_forgotten_block_is_given_out_again() -> None:
    memory = PinnedMemory()
    given = memory.take(3 * MB)
    address = given.data_ptr()
    assert given.numel() == 3 * MB and memory.num_free == 0
    del given
    assert memory.num_free == 1
    again = memory.take(3 * MB - 100)
    assert again.data_ptr() == address and memory.num_blocks == 1


def test_a_block_is_not_shared_nor_wasted_on_much_smaller_adapters() -> None:
    memory = PinnedMemory()
    large = memory.take(64 * MB)
    assert memory.take(64 * MB).data_ptr() != large.data_ptr()
    del large
    small = memory.take(8 * MB)
    assert small.data_ptr() not in {b.memory.data_ptr() for b in memory._free}
    assert memory.num_free == 2


def test_memory_that_nobody_uses_is_given_back_to_the_system() -> None:
    memory = PinnedMemory()
    given = [memory.take(2 * MB) for _ in range(MAX_FREE_BLOCKS + 5)]
    given.clear()
    gc.collect()
    kept = memory.take(64 * MB)
    assert memory.num_free == MAX_FREE_BLOCKS and memory.num_blocks == MAX_FREE_BLOCKS + 1
    assert kept.numel() == 64 * MB


def test_threads_never_get_the_same_block() -> None:
    memory, failures = PinnedMemory(), []

    def work(number: int) -> None:
        for _ in range(200):
            given = memory.take(1 * MB)
            given[::4096] = number
            if not bool((given[::4096] == number).all()):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and memory.num_blocks <= 4 + MAX_FREE_BLOCKS


def assert_unlocked(memory: torch.Tensor) -> None:
    """CUDA refuses to lock what is locked already."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


@pytest.mark.gpu
def test_each_piece_is_copied_without_the_host_waiting_and_closing_unlocks_it() -> None:
    memory = PinnedMemory()
    given = memory.take(2 * PIECE_BYTES + 5 * MB)
    given.random_(0, 255)
    memory.pin(given)
    target = torch.empty_like(given, device="cuda")
    before = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    before.record()
    for to, piece in zip(target.split(PIECE_BYTES), given.split(PIECE_BYTES), strict=True):
        to.copy_(piece, non_blocking=True)
    assert not before.query(), "a copy has waited for what was queued before it"
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), given)
    memory.close()
    assert_unlocked(given)


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_is_an_error_and_none_of_it_stays_locked(monkeypatch) -> None:
    memory = PinnedMemory()
    given = memory.take(4 * MB)
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", MB)
    locked = given[2 * MB : 3 * MB]
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(locked.data_ptr(), locked.numel(), 0))
    # In a thread, as loads do it: CUDA keeps the error and hands it to the same thread's next launch.
    with ThreadPoolExecutor(1) as pool, pytest.raises(LorafleetError, match="Lower max_cpu_loras"):
        pool.submit(memory.pin, given).result()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(locked.data_ptr()))
    assert_unlocked(given)

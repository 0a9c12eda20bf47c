"""Memory moves between a KV cache and adapters on a GPU, beside work that goes on."""

from __future__ import annotations

import time

import pytest
import torch

from lorafleet.protocol.cuda_driver import CudaDriver
from lorafleet.workers.pool.group_layout import PAGE_BYTES, GroupLayout
from lorafleet.workers.pool.group_memory import Arena, GroupMemory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BLOCK_BYTES = 16 * 8 * 128 * 2


def build(num_groups: int = 10, num_tensors: int = 4, num_lendable: int = 6) -> tuple[Arena, GroupMemory]:
    torch.zeros(1, device=DEVICE)
    driver = CudaDriver()
    assert driver.has_virtual_memory(0)
    arena = Arena(driver, DEVICE, PAGE_BYTES, 64 << 30)
    layout = GroupLayout.of([BLOCK_BYTES] * num_tensors, num_groups * 64)
    return arena, GroupMemory(driver, DEVICE, arena, layout, num_lendable)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_a_lent_group_has_the_same_memory_and_comes_back_cleared() -> None:
    arena, groups = build()
    part = groups.layout.part_bytes[0]
    for index, tensor in enumerate(groups.tensors):
        tensor[4 * part : 5 * part].fill_(index + 1)
        tensor[5 * part : 6 * part].fill_(99)
    torch.cuda.synchronize()
    before = free_bytes()
    groups.lend(4, region=2)
    assert free_bytes() == before, "memory moves, and none is taken or freed"
    start = PAGE_BYTES + 2 * groups.layout.group_bytes
    assert [int(arena.memory[start + i * part]) for i in range(4)] == [1, 2, 3, 4]
    arena.memory[start : start + groups.layout.group_bytes].fill_(7)
    assert all(int(tensor[5 * part]) == 99 for tensor in groups.tensors), "a neighbor is as it was"
    groups.give_back(4, region=2)
    assert all(not tensor[4 * part : 5 * part].any() for tensor in groups.tensors)
    assert all(tensor[5 * part : 6 * part].eq(99).all() for tensor in groups.tensors)


def test_a_graph_reads_a_group_that_was_away_in_between() -> None:
    arena, groups = build()
    part, tensor = groups.layout.part_bytes[0], groups.tensors[0]
    index = torch.tensor([4 * part], device=DEVICE)
    found, adapter = torch.zeros(1, dtype=torch.uint8, device=DEVICE), torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    start = PAGE_BYTES
    groups.lend(4, region=0)
    groups.give_back(4, region=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(tensor, 0, index, out=found)
    tensor[4 * part].fill_(5)
    graph.replay()
    assert int(found) == 5
    groups.lend(4, region=0)
    arena.memory[start] = 9
    adapter.copy_(arena.memory[start : start + 1])
    index.fill_(3 * part)
    tensor[3 * part].fill_(6)
    graph.replay()
    assert int(found) == 6 and int(adapter) == 9
    groups.give_back(4, region=0)
    index.fill_(4 * part)
    graph.replay()
    assert int(found) == 0


def test_memory_is_freed_with_the_tensors_and_taken_again_after_sleep() -> None:
    torch.zeros(1, device=DEVICE)
    before = free_bytes()
    arena, groups = build(num_groups=100)
    held = before - free_bytes()
    assert held >= groups.num_bytes + arena.num_bytes
    groups.empty()
    arena.empty()
    assert free_bytes() >= before - (16 << 20)
    groups.allocate()
    arena.allocate()
    assert all(not tensor.any() for tensor in groups.tensors)
    groups.lend(95, 0)
    del arena, groups
    assert free_bytes() >= before - (16 << 20)


def test_groups_move_while_kernels_run() -> None:
    _, groups = build(num_groups=24, num_tensors=64, num_lendable=16)
    x = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)

    def work(count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            torch.mm(x, x)
        end.record()
        return begin, end

    work(50)[1].synchronize()
    begin, end = work(900)  # fewer than the driver queues
    end.synchronize()
    alone_ms = begin.elapsed_time(end)
    lend_s, back_s, moved_beside = [], [], 0
    begin, end = work(900)
    for group in range(7, 23):
        start = time.perf_counter()
        groups.lend(group, group - 7)
        middle = time.perf_counter()
        groups.give_back(group, group - 7)
        back_s.append(time.perf_counter() - middle)
        lend_s.append(middle - start)
        moved_beside += not end.query()
    end.synchronize()
    print(
        f"\n128 MiB in 64 pages: lend {min(lend_s) * 1e3:.2f}-{max(lend_s) * 1e3:.2f} ms, back {min(back_s) * 1e3:.2f}-"
        f"{max(back_s) * 1e3:.2f} ms, {moved_beside} of 16 moved beside kernels, which took {alone_ms:.1f} ms alone "
        f"and {begin.elapsed_time(end):.1f} ms beside moves"
    )
    assert moved_beside > 0, "moves do not wait for the GPU"

"""The memory that all slots share gives each adapter a place of its size."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest

from lorafleet.protocol.errors import AdapterTooLarge
from lorafleet.workers.slots.lora_memory import MAX_EXTENTS, Extent, LoRAMemory


def cuts_of(*sizes: int) -> list[int]:
    return [0, *accumulate(sizes)]


def take(memory: LoRAMemory, *sizes: int) -> list[Extent]:
    found = memory.find(cuts_of(*sizes))
    assert found is not None
    memory.take(found)
    return found


def test_a_block_lies_in_the_smallest_range_that_holds_it_whole() -> None:
    memory = LoRAMemory(100)
    first, _, third, _ = take(memory, 30), take(memory, 5), take(memory, 20), take(memory, 5)
    memory.give_back(first)
    memory.give_back(third)
    assert memory.free_ranges == [(0, 30), (35, 20), (60, 40)]
    assert memory.find(cuts_of(10, 10)) == [Extent(35, 20, 2)]
    assert memory.find(cuts_of(10, 11)) == [Extent(0, 21, 2)]
    assert memory.num_used == 10


def test_a_block_is_cut_between_matrices_when_no_range_holds_it_whole() -> None:
    memory = LoRAMemory(100)
    first, second, _ = take(memory, 40), take(memory, 20), take(memory, 40)
    assert memory.find(cuts_of(10)) is None
    assert memory.find(cuts_of(10), first) == [Extent(0, 10, 1)], "the adapter in it leaves"
    memory.give_back(first)
    assert memory.find(cuts_of(15, 15, 15)) is None
    third = take(memory, 5)
    memory.give_back(second)
    memory.take([Extent(40, 5, 1)])
    assert memory.find(cuts_of(15, 15, 15)) == [Extent(5, 30, 2), Extent(45, 15, 1)]
    assert memory.find(cuts_of(30, 20)) is None, "a matrix is never cut"
    memory.give_back(third)
    memory.give_back([Extent(40, 5, 1)])
    assert memory.free_ranges == [(0, 60)], "ranges that touch are one"


def test_an_adapter_without_matrices_takes_nothing() -> None:
    memory = LoRAMemory(0)
    assert memory.find([0]) == [] and memory.free_ranges == []


def test_a_block_is_never_cut_into_more_parts_than_copies_are_cheap() -> None:
    memory = LoRAMemory(4 * MAX_EXTENTS)
    parts = [take(memory, 1) for _ in range(4 * MAX_EXTENTS)]
    for part in parts[::2]:
        memory.give_back(part)
    assert len(memory.find(cuts_of(*[1] * MAX_EXTENTS)) or ()) == MAX_EXTENTS
    assert memory.find(cuts_of(*[1] * (MAX_EXTENTS + 1))) is None


def test_a_block_larger_than_the_memory_is_refused_with_bytes_bound_and_remedy() -> None:
    LoRAMemory(100).check(100, "fits")
    with pytest.raises(AdapterTooLarge, match=r"'big' needs 101 bytes.* allows 100 .*Raise lora.lora_memory_gib"):
        LoRAMemory(100).check(101, "big")


@pytest.mark.parametrize("num_bytes", [101, 491_520, 2**30 // 1000 + 1])
def test_the_remedy_for_a_block_that_is_too_large_is_enough(num_bytes: int) -> None:
    with pytest.raises(AdapterTooLarge) as refusal:
        LoRAMemory(100).check(num_bytes, "big")
    gib = float(refusal.value.message.split("to at least ")[1].split()[0])
    LoRAMemory(int(gib * 2**30)).check(num_bytes, "big")


@pytest.mark.parametrize("seed", range(20))
def test_no_two_blocks_share_a_byte_and_each_matrix_lies_in_one_range(seed: int) -> None:
    random, memory = Random(seed), LoRAMemory(1000)
    held: list[tuple[list[int], list[Extent]]] = []
    for _ in range(200):
        cuts = cuts_of(*random.choices(range(1, 40), k=random.randint(1, 12)))
        found = memory.find(cuts)
        if found is None:
            memory.give_back(held.pop(random.randrange(len(held)))[1])
            continue
        memory.take(found)
        held.append((cuts, found))
        first = 0
        for extent in found:
            assert extent.num_bytes == cuts[first + extent.num_matrices] - cuts[first]
            first += extent.num_matrices
        assert first == len(cuts) - 1
        used = [(extent.start, extent.num_bytes) for _, extents in held for extent in extents]
        ranges = sorted([*memory.free_ranges, *used])
        assert [start for start, _ in ranges] == [0, *accumulate(size for _, size in ranges)][:-1]
        assert memory.num_used == sum(size for _, size in used)


def test_memory_grows_and_shrinks_where_nothing_lies() -> None:
    memory = LoRAMemory(100)
    memory.most_bytes = 300
    take(memory, 100)
    memory.check(300, "large")
    assert memory.find(cuts_of(80)) is None
    memory.grow(200, 100)
    memory.grow(100, 100)
    assert (memory.num_bytes, memory.free_ranges) == (300, [(100, 200)]), "neighbors are one range"
    second = take(memory, 120)
    assert memory.free_ranges == [(220, 80)]
    memory.give_back(second)
    assert memory.free_ranges == [(100, 200)]
    memory.shrink(200, 100)
    assert (memory.num_bytes, memory.num_used, memory.free_ranges) == (200, 100, [(100, 100)])
    with pytest.raises(AdapterTooLarge, match="allows 300"):
        memory.check(301, "too large")

from __future__ import annotations

import torch

from lorafleet.kernels.packed_lora import AdapterTable
from lorafleet.workers.lora.cpu_tier import CPUTier
from lorafleet.workers.lora.eviction import Demand
from lorafleet.workers.lora.packed_adapter import LoadTimes, PackedAdapter
from lorafleet.workers.lora.request import AdapterInfo


def adapter(digest: str, num_bytes: int = 100) -> PackedAdapter:
    info = AdapterInfo(digest, 8, num_bytes, ["q_proj"])
    block = torch.empty(num_bytes, dtype=torch.uint8)
    return PackedAdapter(info, block, torch.float32, AdapterTable.empty(1), LoadTimes(0, 0, 0))


def not_needed(_: str) -> int:
    return 0


def test_among_equals_the_least_recently_used_one_goes() -> None:
    tier = CPUTier(2, Demand(2))
    tier.add(adapter("a"), not_needed)
    tier.add(adapter("b"), not_needed)
    tier.touch("a")
    tier.add(adapter("c"), not_needed)
    assert tier.digests == ["a", "c"]


def test_what_is_asked_for_often_outlives_what_came_later_once() -> None:
    demand = Demand(2)
    tier = CPUTier(2, demand)
    for _ in range(5):
        demand.count("hot")
    tier.add(adapter("hot"), not_needed)
    for i in range(3):
        demand.count(f"cold{i}")
        tier.add(adapter(f"cold{i}"), not_needed)
        assert tier.digests == ["hot", f"cold{i}"]


def test_what_was_hot_goes_once_others_are_used_and_it_is_not() -> None:
    demand = Demand(2)
    tier = CPUTier(2, demand)
    for _ in range(5):
        demand.count("was hot")
    tier.add(adapter("was hot"), not_needed)
    lived = 0
    while "was hot" in tier:
        tier.add(adapter(f"cold{lived}"), not_needed)
        lived += 1
    assert 4 <= lived <= 6


def test_a_large_adapter_outlives_small_ones_that_were_used_later_but_not_for_ever() -> None:
    tier = CPUTier(2, Demand(2))
    tier.add(adapter("large", 400), not_needed)
    lived = 0
    while "large" in tier:
        tier.add(adapter(f"small{lived}"), not_needed)
        lived += 1
    assert 4 <= lived <= 6


def test_what_is_needed_goes_last_and_what_has_just_come_never() -> None:
    tier = CPUTier(2, Demand(2))
    tier.add(adapter("waited for"), not_needed)
    tier.add(adapter("in a slot", 400), not_needed)
    needs = {"waited for": 2, "in a slot": 1}
    tier.add(adapter("new"), lambda digest: needs.get(digest, 0))
    assert tier.digests == ["waited for", "new"]

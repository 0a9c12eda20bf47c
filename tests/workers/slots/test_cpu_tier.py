from __future__ import annotations

from collections import Counter
from random import Random

import torch

from lorafleet.kernels.lora.packed_lora import AdapterTable
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.slots.cpu_tier import CPUTier
from lorafleet.workers.slots.eviction import RECENT_S, Demand
from lorafleet.workers.slots.packed_adapter import LoadTimes, PackedAdapter


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


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Tenants:
    """A tier with the requests of two tenants; the engine counts each and loads what is not here."""

    def __init__(self, capacity: int) -> None:
        self.clock = Clock()
        self.demand = Demand(capacity, self.clock)
        self.tier = CPUTier(capacity, self.demand)
        self.loads = Counter[str]()  # by tenant

    def ask(self, tenant: str, digest: str, num_bytes: int = 100) -> None:
        self.demand.count(digest)
        self.demand.want(tenant)
        self.tier.charge(digest, tenant)
        if digest in self.tier:
            self.tier.touch(digest)
        else:
            self.loads[tenant] += 1
            self.tier.add(adapter(digest, num_bytes), not_needed, tenant)


def test_hot_small_adapters_survive_another_tenants_many_new_large_ones() -> None:
    tenants = Tenants(8)
    hot = [f"hot{i}" for i in range(4)]
    for digest in hot:
        tenants.ask("quiet", digest)
    for i in range(400):
        tenants.ask("noisy", f"new{i}", 1000)
        if i % 10 == 9:  # a tenth of the other's rate
            tenants.ask("quiet", hot[i // 10 % 4])
    assert tenants.loads["quiet"] == 4
    assert tenants.loads["noisy"] == 400
    assert len(tenants.tier) == 8, "the noisy tenant has the other half"


def test_a_tenant_that_comes_to_a_full_tier_gets_its_share_and_keeps_it() -> None:
    tenants = Tenants(8)
    for i in range(20):
        tenants.ask("noisy", f"old{i}", 1000)
    for i in range(40):
        tenants.ask("quiet", f"own{i % 4}")
        tenants.ask("noisy", f"new{i}", 1000)
    assert tenants.loads["quiet"] == 4


def test_more_tenants_than_places_each_get_one_by_turns() -> None:
    tenants = Tenants(2)
    for i in range(9):
        tenants.ask(f"t{i % 3}", f"adapter{i % 3}")
        assert f"adapter{i % 3}" in tenants.tier


def test_an_adapter_of_two_tenants_is_not_evicted_for_the_one_that_has_most() -> None:
    tenants = Tenants(4)
    for digest in ("public", "old", "older"):
        tenants.ask("noisy", digest)
    tenants.ask("quiet", "public")
    for i in range(40):
        tenants.ask("noisy", "public" if i < 20 else f"new{i}", 1000)
    tenants.ask("quiet", "public")
    assert tenants.loads["quiet"] == 0 and "public" in tenants.tier


def test_a_tenant_that_wants_nothing_any_more_keeps_no_share() -> None:
    tenants = Tenants(4)
    for i in range(4):
        tenants.ask("gone", f"old{i}")
    tenants.clock.now_s += RECENT_S
    for i in range(40):
        tenants.ask("busy", f"new{i % 4}")
    assert tenants.loads["busy"] == 4


def test_with_one_tenant_exactly_that_goes_which_would_go_with_none() -> None:
    random, named, without = Random(1), Tenants(8), Tenants(8)
    for _ in range(2000):
        number = int(random.paretovariate(0.6)) % 40
        for tenants, tenant in ((named, "only"), (without, "")):
            tenants.ask(tenant, f"a{number}", 100 * (1 + number % 7))
            tenants.clock.now_s += 0.1
        assert named.tier.digests == without.tier.digests
    assert named.loads["only"] == without.loads[""]

"""Which adapter gets which slot, without a model or a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.slots.eviction import Demand
from lorafleet.workers.slots.lora_memory import LoRAMemory
from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy
from lorafleet.workers.slots.slot_room import SlotRoom


@dataclass
class Extra:
    num_bytes: int


class Adapter:
    """One of matrices of 10 bytes, whose A and B take a number of them."""

    def __init__(self, digest: str, extra_bytes: int = 0, num_bytes: int = 100) -> None:
        self.info = AdapterInfo(digest, 8, num_bytes, ["q_proj"])
        self.cuts = list(range(0, num_bytes + 1, 10))
        self.extra = Extra(extra_bytes) if extra_bytes else None
        self.extra_bytes = extra_bytes


class Memory:
    """Memory for extras that is free as soon as an adapter leaves."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    def missing(self, num_bytes: int) -> int:
        return max(0, self.num_bytes + num_bytes - self.limit)

    def is_free(self, num_bytes: int) -> bool:
        return self.missing(num_bytes) == 0


class Slots:
    """A policy, and what the writer of the slots does beside it."""

    def __init__(
        self, num_slots: int, extra_limit: int = 100, num_bytes: int = 1000, max_in_use: int | None = None
    ) -> None:
        self.demand = Demand(num_slots)
        self.memory, self.extras = LoRAMemory(num_bytes), Memory(extra_limit)
        self.quiet: list[int] = []
        in_use = max_in_use or num_slots
        self.policy = SlotPolicy(
            num_slots, in_use, self.demand, self.memory, self.extras, lambda slot: self.quiet.append(slot.index)
        )
        self.room = SlotRoom(self.policy)

    def victim(self, wanted: Sequence[str] = (), keep: Sequence[str] = (), tenant: str = "") -> Slot | None:
        return self.room.victim(Adapter("new"), wanted, keep, tenant)

    def fill(self, adapter: Adapter, tenant: str = "", slot: Slot | None = None) -> Slot:
        slot = slot or self.room.victim(adapter, tenant=tenant)
        assert slot is not None
        self.empty(slot)
        extents = self.memory.find(adapter.cuts)
        assert extents is not None
        self.memory.take(extents)
        slot.extents = tuple(extents)
        self.policy.assign(slot, adapter, tenant)
        if adapter.extra is not None:
            slot.extra = adapter.extra
            self.extras.num_bytes += adapter.extra_bytes
        return slot

    def empty(self, slot: Slot) -> None:
        if slot.digest is not None:
            self.memory.give_back(slot.extents)
            self.extras.num_bytes -= 0 if slot.extra is None else slot.extra.num_bytes
            self.policy.clear(slot, for_room=True)


def digests(slots: list[Slot] | None) -> list[str | None] | None:
    return None if slots is None else [slot.digest for slot in slots]


def test_empty_slots_are_filled_first_and_then_the_least_recently_used_one() -> None:
    slots = Slots(2)
    first, second = slots.fill(Adapter("a")), slots.fill(Adapter("b"))
    assert (first.index, second.index) == (0, 1)
    assert slots.victim() is first
    slots.policy.hold(first.index)
    slots.policy.let_go(first.index)
    assert slots.victim() is second
    assert slots.fill(Adapter("c")) is second
    assert list(slots.policy.usable_digests) == ["a", "c"]
    assert (slots.policy.find("b"), slots.policy.find("c")) == (None, second)
    assert (second.generation, slots.policy.num_activations, slots.policy.num_evictions) == (1, 3, 1)


def test_the_adapter_that_is_requested_most_is_the_last_victim() -> None:
    slots = Slots(2)
    for _ in range(5):
        slots.demand.count("hot")
    slots.fill(Adapter("hot"))
    for name in ("b", "c", "d"):
        assert slots.fill(Adapter(name)).index == 1


def test_adapters_that_are_waited_for_are_victims_in_the_reverse_order_of_the_queue() -> None:
    slots = Slots(3)
    for name in ("a", "b", "c"):
        slots.fill(Adapter(name))
    assert slots.victim(["a", "b"]).digest == "c"
    assert slots.victim(["c", "a", "b"]).digest == "b"
    assert slots.victim(["c", "a", "b"], keep=["b"]).digest == "a"
    assert slots.victim(keep=["a", "b", "c"]) is None


def test_slots_that_are_held_pinned_or_being_filled_are_no_victims() -> None:
    class Copy:
        ended = False

        def query(self) -> bool:
            return self.ended

    slots = Slots(3)
    held, pinned, copying = (slots.fill(Adapter(name)) for name in "abc")
    slots.policy.hold(held.index)
    slots.policy.hold(held.index)
    slots.policy.pin(pinned)
    copying.ready = Copy()
    assert slots.victim() is None and not copying.is_ready
    assert (slots.policy.num_idle, slots.policy.num_pinned) == (1, 1)
    copying.ready.ended = True
    assert slots.victim() is copying
    slots.policy.let_go(held.index)
    assert slots.quiet == []
    slots.policy.let_go(held.index)
    assert slots.quiet == [held.index], "once, when its last sequence has ended"
    with pytest.raises(AssertionError):
        slots.policy.assign(pinned, Adapter("d"), "")


def test_a_tenant_with_most_slots_takes_none_of_the_others() -> None:
    slots = Slots(4)
    slots.demand.want("noisy")
    slots.demand.want("quiet")
    slots.fill(Adapter("quiet's"), "quiet")
    for name in ("n1", "n2", "n3"):
        slots.fill(Adapter(name), "noisy")
    assert slots.victim(tenant="noisy").digest == "n1"
    assert slots.victim(tenant="quiet").digest == "n1"
    assert digests(slots.room.to_drain(Adapter("new"), set(), "noisy")) == ["n1"]


def test_room_for_extras_is_made_by_emptying_idle_slots_but_not_more_than_needed() -> None:
    slots = Slots(4, extra_limit=100)
    a, b, c = (slots.fill(Adapter(name, 30)) for name in "abc")
    empty = slots.victim()
    assert slots.room.to_empty(Adapter("plain"), empty) == []
    assert slots.room.to_empty(Adapter("small", 10), empty) == []
    large = Adapter("large", 60)
    assert not slots.room.is_free(large, empty)
    assert digests(slots.room.to_empty(large, empty)) == ["a", "b"]
    assert digests(slots.room.to_empty(large, c)) == ["c", "a"], "its own extras are in the way"
    slots.policy.hold(a.index)
    assert slots.room.to_empty(Adapter("whole", 100), empty) is None
    slots.policy.pin(b)
    assert slots.policy.pinned_extra_bytes == 30
    for slot in (a, c):
        slot.holders = 0
        slots.empty(slot)
    assert slots.room.is_free(large, empty)


def test_slots_that_fewest_sequences_hold_drain_first_and_as_many_as_extras_need() -> None:
    slots = Slots(3, extra_limit=90)
    for name, num_holders in zip("abc", (3, 1, 2), strict=True):
        slot = slots.fill(Adapter(name, 30))
        for _ in range(num_holders):
            slots.policy.hold(slot.index)
    assert digests(slots.room.to_drain(Adapter("plain"), set())) == ["b"]
    assert digests(slots.room.to_drain(Adapter("plain"), {1})) == ["c"]
    assert digests(slots.room.to_drain(Adapter("large", 60), set())) == ["b", "c"]


def test_numbers_of_the_adapters_in_slots() -> None:
    slots = Slots(3)
    slots.fill(Adapter("a", num_bytes=5))
    slots.fill(Adapter("b", num_bytes=7))
    assert slots.policy.ranks == [8, 8, 0]
    assert slots.policy.num_bytes == 12


def test_small_adapters_take_their_own_bytes_and_leave_for_a_large_one_only_as_far_as_it_needs() -> None:
    slots = Slots(8, num_bytes=100)
    for name in "abcde":
        slots.fill(Adapter(name, num_bytes=20))
    large, empty = Adapter("large", num_bytes=60), slots.victim()
    assert empty is not None and empty.digest is None
    assert not slots.room.is_free(large, empty)
    assert digests(slots.room.to_empty(large, empty)) == ["a", "b", "c"]
    assert digests(slots.room.to_empty(large, empty, wanted=["a"], keep=["b"])) == ["c", "d", "e"]
    assert digests(slots.room.to_empty(Adapter("none", num_bytes=0), empty)) == []
    for slot in slots.policy.slots[:3]:
        slots.policy.hold(slot.index)
    assert slots.room.to_empty(large, empty) is None and slots.room.waits_for_others(large, ())
    assert not slots.room.waits_for_others(Adapter("medium", num_bytes=40), ())
    assert digests(slots.room.to_drain(large, set())) == ["d", "e", "a"]
    slots.policy.pin(slots.policy.slots[3])
    slots.policy.pin(slots.policy.slots[4])
    assert not slots.room.is_kept_out(large) and slots.room.is_kept_out(Adapter("huge", num_bytes=70))


def test_an_adapter_that_a_later_one_makes_superfluous_stays() -> None:
    slots = Slots(8, num_bytes=100)
    slots.fill(Adapter("small", num_bytes=20))
    slots.fill(Adapter("large", num_bytes=80))
    empty = slots.victim()
    assert empty is not None
    assert digests(slots.room.to_empty(Adapter("new", num_bytes=70), empty)) == ["large"]


def test_a_tenant_s_share_is_counted_in_bytes() -> None:
    slots = Slots(8, num_bytes=100)
    slots.demand.want("few large")
    slots.demand.want("many small")
    slots.fill(Adapter("l", num_bytes=60), "few large")
    for name in ("s1", "s2", "s3", "s4"):
        slots.fill(Adapter(name, num_bytes=10), "many small")
    empty = slots.victim()
    assert empty is not None
    assert digests(slots.room.to_empty(Adapter("s5", num_bytes=10), empty, tenant="many small")) == ["l"]
    assert digests(slots.room.to_empty(Adapter("l2", num_bytes=60), empty, tenant="few large")) == ["l"]


def test_a_tenant_does_not_exceed_its_share_by_taking_another_s_only_adapter() -> None:
    slots = Slots(8, num_bytes=100)
    slots.demand.want("one large")
    slots.demand.want("many small")
    slots.fill(Adapter("l", num_bytes=60), "one large")
    for name in ("s1", "s2", "s3", "s4"):
        slots.fill(Adapter(name, num_bytes=10), "many small")
    empty = slots.victim()
    assert empty is not None
    s5 = Adapter("s5", num_bytes=20)
    assert digests(slots.room.to_empty(s5, empty, tenant="many small")) == ["s1", "l"]
    assert digests(slots.room.to_drain(s5, set(), "many small")) == ["s1", "l"]
    assert digests(slots.room.to_empty(Adapter("s5", num_bytes=10), empty, tenant="many small")) == ["l"]


def test_each_adapter_that_leaves_is_counted_before_the_next_one_is_taken_from_another_tenant() -> None:
    slots = Slots(9, num_bytes=100)
    for tenant, num_bytes in (("takes", 20), ("third", 20)):
        slots.demand.want(tenant)
        slots.policy.hold(slots.fill(Adapter(tenant, num_bytes=num_bytes), tenant).index, tenant)
    slots.demand.want("loses")
    for number in range(6):
        slots.fill(Adapter(f"l{number}", num_bytes=10), "loses")
    empty = slots.victim()
    assert empty is not None
    assert digests(slots.room.to_empty(Adapter("new", num_bytes=20), empty, tenant="takes")) == ["l0", "l1"]
    assert slots.room.to_empty(Adapter("new", num_bytes=30), empty, tenant="takes") is None


def test_tenants_that_take_from_others_hold_at_most_the_even_share_or_what_another_keeps_or_one_adapter() -> None:
    random = Random(5)
    slots = Slots(40, num_bytes=1000)
    held: dict[str, Counter[str]] = {tenant: Counter() for tenant in ("few", "some", "many")}
    num_taken = 0
    for number in range(3000):
        tenant = random.choice(list(held))
        largest = {"few": 60, "some": 20, "many": 4}[tenant]
        adapter = Adapter(f"{tenant} {number}", num_bytes=10 * random.randint(1, largest))
        slots.demand.want(tenant)
        slot = slots.room.victim(adapter, tenant=tenant)
        assert slot is not None
        leaving = [slot] * (slot.digest is not None) + (slots.room.to_empty(adapter, slot, tenant=tenant) or [])
        holders = {tenant, *(holder for holder, sizes in held.items() if sizes)}
        even = sum(sizes.total() for sizes in held.values()) / len(holders)
        victims: set[str] = set()
        for leaver in leaving:
            assert leaver.digest is not None
            owner = leaver.digest.split()[0]
            victims.add(owner)
            held[owner].pop(leaver.digest)
            slots.empty(leaver)
        if slots.room.is_free(adapter, slot):
            slots.fill(adapter, tenant, slot)
            held[tenant][adapter.info.digest] = adapter.info.num_bytes
        own = held[tenant].total()
        if victims - {tenant}:
            num_taken += 1
            most_kept = max(sizes.total() for sizes in held.values() if sizes is not held[tenant])
            assert own <= max(even, most_kept) or len(held[tenant]) == 1
    assert num_taken > 300


def test_only_so_many_slots_are_used_at_the_same_time_and_one_yields() -> None:
    slots = Slots(4, max_in_use=2)
    for name, num_holders in (("a", 2), ("b", 1), ("c", 0)):
        slot = slots.fill(Adapter(name))
        for _ in range(num_holders):
            slots.policy.hold(slot.index)
    assert [slots.policy.may_use(index) for index in range(3)] == [True, True, False]
    assert (slots.policy.num_in_use, slots.policy.num_usable) == (2, 0)
    assert digests(slots.room.to_yield(set())) == ["b"] and digests(slots.room.to_yield({1})) == ["a"]
    assert slots.policy.usable_digests == {"a", "b"}
    slots.policy.let_go(1)
    assert {*slots.policy.usable_digests} == {"a", "b", "c"}
    assert slots.policy.may_use(2) and slots.room.to_yield(set()) == [] and slots.policy.num_usable == 1


def test_usable_slots_are_those_for_whose_adapters_memory_has_room() -> None:
    slots = Slots(8, num_bytes=400)
    assert slots.policy.num_usable == 8, "no adapter says how large the next will be"
    for name in ("a", "b", "c"):
        slots.fill(Adapter(name))
    assert slots.policy.num_usable == 4, "idle adapters make room"
    slots.policy.hold(0)
    slots.policy.hold(1)
    assert slots.policy.num_usable == 2
    slots.policy.let_go(1)
    assert slots.policy.num_usable == 3

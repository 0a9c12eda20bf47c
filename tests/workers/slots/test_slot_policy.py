"""Which adapter gets which slot, without a model or a device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.slots.eviction import Demand
from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy


@dataclass
class Extra:
    num_bytes: int


class Adapter:
    def __init__(self, digest: str, extra_bytes: int = 0, num_bytes: int = 100) -> None:
        self.info = AdapterInfo(digest, 8, num_bytes, ["q_proj"])
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

    def __init__(self, num_slots: int, extra_limit: int = 100) -> None:
        self.demand = Demand(num_slots)
        self.memory = Memory(extra_limit)
        self.quiet: list[int] = []
        self.policy = SlotPolicy(num_slots, self.demand, self.memory, lambda slot: self.quiet.append(slot.index))

    def fill(self, adapter: Adapter, tenant: str = "", slot: Slot | None = None) -> Slot:
        slot = slot or self.policy.victim(tenant=tenant)
        assert slot is not None
        self.empty(slot)
        self.policy.assign(slot, adapter, tenant)
        if adapter.extra is not None:
            slot.extra = adapter.extra
            self.memory.num_bytes += adapter.extra_bytes
        return slot

    def empty(self, slot: Slot) -> None:
        if slot.digest is not None:
            self.memory.num_bytes -= 0 if slot.extra is None else slot.extra.num_bytes
            self.policy.clear(slot, for_room=True)


def digests(slots: list[Slot] | None) -> list[str | None] | None:
    return None if slots is None else [slot.digest for slot in slots]


def test_empty_slots_are_filled_first_and_then_the_least_recently_used_one() -> None:
    slots = Slots(2)
    first, second = slots.fill(Adapter("a")), slots.fill(Adapter("b"))
    assert (first.index, second.index) == (0, 1)
    assert slots.policy.victim() is first
    slots.policy.hold(first.index)
    slots.policy.let_go(first.index)
    assert slots.policy.victim() is second
    assert slots.fill(Adapter("c")) is second
    assert list(slots.policy.digests) == ["a", "c"]
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
    assert slots.policy.victim(["a", "b"]).digest == "c"
    assert slots.policy.victim(["c", "a", "b"]).digest == "b"
    assert slots.policy.victim(["c", "a", "b"], keep=["b"]).digest == "a"
    assert slots.policy.victim(keep=["a", "b", "c"]) is None


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
    assert slots.policy.victim() is None and not copying.is_ready
    assert (slots.policy.num_idle, slots.policy.num_pinned) == (1, 1)
    copying.ready.ended = True
    assert slots.policy.victim() is copying
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
    assert slots.policy.victim(tenant="noisy").digest == "n1"
    assert slots.policy.victim(tenant="quiet").digest == "n1"
    assert digests(slots.policy.to_drain(Adapter("new"), set(), "noisy")) == ["n1"]


def test_room_for_extras_is_made_by_emptying_idle_slots_but_not_more_than_needed() -> None:
    slots = Slots(4, extra_limit=100)
    a, b, c = (slots.fill(Adapter(name, 30)) for name in "abc")
    empty = slots.policy.victim()
    assert slots.policy.to_empty(Adapter("plain"), empty) == []
    assert slots.policy.to_empty(Adapter("small", 10), empty) == []
    large = Adapter("large", 60)
    assert not slots.policy.has_room(large, empty)
    assert digests(slots.policy.to_empty(large, empty)) == ["a", "b"]
    assert digests(slots.policy.to_empty(large, c)) == ["c", "a"], "its own slot is emptied in any case"
    slots.policy.hold(a.index)
    assert slots.policy.to_empty(Adapter("whole", 100), empty) is None
    slots.policy.pin(b)
    assert slots.policy.pinned_extra_bytes == 30
    for slot in (a, c):
        slot.holders = 0
        slots.empty(slot)
    assert slots.policy.has_room(large, empty)


def test_slots_that_fewest_sequences_hold_drain_first_and_as_many_as_extras_need() -> None:
    slots = Slots(3, extra_limit=90)
    for name, num_holders in zip("abc", (3, 1, 2), strict=True):
        slot = slots.fill(Adapter(name, 30))
        for _ in range(num_holders):
            slots.policy.hold(slot.index)
    assert digests(slots.policy.to_drain(Adapter("plain"), set())) == ["b"]
    assert digests(slots.policy.to_drain(Adapter("plain"), {1})) == ["c"]
    assert digests(slots.policy.to_drain(Adapter("large", 60), set())) == ["b", "c"]


def test_numbers_of_the_adapters_in_slots() -> None:
    slots = Slots(3)
    slots.fill(Adapter("a", num_bytes=5))
    slots.fill(Adapter("b", num_bytes=7))
    assert slots.policy.ranks == [8, 8, 0]
    assert slots.policy.num_bytes == 12

"""Balances the tenants that share a step, so that in time all of them run equally many sequences, as far as they
request as many. It chooses who starts and who is preempted for that; the scheduler does both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from lorafleet.workers.schedule.adapter_slots import AdapterSlots
from lorafleet.workers.schedule.fair_queue import FairQueue
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.slot_claims import SlotClaims

_tenant = attrgetter("tenant")


@dataclass(frozen=True, slots=True)
class Favor:
    """The start of a sequence before all others, because another tenant runs more sequences than its own."""

    tenant: str
    head: Sequence | None  # The sequence that starts; None if its adapter takes the victims' slot first.
    victims: list[Sequence]  # Running sequences that are preempted for it, in the order of their start.


def poorest_first(running: list[Sequence]) -> list[Sequence]:
    """Returns the sequences, those of tenants that run fewest first, otherwise in the order of their start."""
    if len(set(map(_tenant, running))) < 2:
        return running[:]
    num_running = Counter(map(_tenant, running))
    return sorted(running, key=lambda sequence: num_running[sequence.tenant])


def find_favor(
    running: list[Sequence],
    waiting: FairQueue,
    loras: AdapterSlots | None,
    has_room: Callable[[Sequence], bool],
) -> Favor | None:
    """Returns the favor for a tenant that waits while another runs more sequences than it would even then.

    Args:
        has_room: Returns whether a sequence could start without preempting another.
    """
    num_running = Counter(map(_tenant, running))
    richest, most = max(num_running.items(), key=itemgetter(1), default=("", 0))
    tenants = waiting.waiting_tenants()
    if all(most <= num_running[tenant] + 1 for tenant in tenants):
        return None
    claims = SlotClaims(loras)
    for tenant in tenants:
        heads = waiting.heads_of(tenant)
        head = claims.first_startable(heads)  # even if the tenant runs enough, since its requests claim slots too
        if most <= num_running[tenant] + 1:
            continue
        if head is None:
            holders = _holders_of_a_slot_for(heads, running, num_running, loras)
            if holders:
                return Favor(tenant, None, holders)
        elif has_room(head):
            return Favor(tenant, head, [])
        else:
            youngest = next(sequence for sequence in reversed(running) if sequence.tenant == richest)
            return Favor(tenant, head, [youngest])
    return None


def _holders_of_a_slot_for(
    heads: Iterable[Sequence], running: list[Sequence], num_running: Counter[str], loras: AdapterSlots | None
) -> list[Sequence]:
    """Returns the running sequences that hold the slot that one of the heads would take next, if all of their tenants
    run more than the head's."""
    for head in heads:  # there are none if the tenant waits only with preempted sequences
        assert head.lora is not None and loras is not None
        slot = loras.slots.find(head.lora.digest)
        if slot is not None and loras.slots.may_use(slot.index):
            continue  # its slot is being filled
        claimed = loras.claims(head.lora.digest, set(), head.tenant)
        holders = [sequence for sequence in running if sequence.slot in claimed]
        if holders and all(num_running[holder.tenant] > num_running[head.tenant] + 1 for holder in holders):
            return holders
    return []

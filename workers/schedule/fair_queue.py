"""The waiting sequences of one engine, and in which order they may start: each tenant gets its fair share, and of that
each of its adapters.

A virtual counter says how much service an adapter has had, in prompt and answer tokens. The adapter with the least
comes next, its own requests by their priority and then in the order of their arrival; the base model counts as one
adapter, and so do two names for the same bytes. Whoever was idle starts at the least counter of those that wait: idling
saves up nothing. So while two adapters wait, what they get differs by a bounded number of tokens, however much more one
of them asks for, and nothing is held back from an adapter that waits alone.
Source: VTC, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Tenants have counters of the same kind. The adapters of a tenant that is more than slot_credit tokens ahead of the one
that has had least come after all others: a tenant gains nothing by ever new adapters.

With more adapters than slots, those in a slot come before the others until they are slot_credit tokens ahead: else
every request would push another adapter out, and a step would hold one request a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from lorafleet.workers.schedule.sequence import Lane, Sequence, TenantTurn

PROMPT_WEIGHT = 1  # of a prompt token that must be computed; one from the prefix cache is free
OUTPUT_WEIGHT = 2  # VTC's
MAX_IDLE_LANES = 1024  # kept at least, before those are forgotten whose counters say nothing any more


class FairQueue:
    """slot_credit: weighted tokens by which an adapter in a slot may be ahead of one that has none."""

    def __init__(self, slot_credit: int) -> None:
        self.num_tokens = 0  # of all that wait
        self.started_tokens = 0  # of all that ever started
        self._slot_credit = slot_credit
        self._preempted: deque[Sequence] = deque()
        self._lanes: dict[tuple[str, str], Lane] = {}  # by tenant and digest
        self._tenants: dict[str, TenantTurn] = {}  # all that there ever were, which the operator's key file bounds
        self._waiting_tenants: dict[str, TenantTurn] = {}
        self._least_tenant = 0  # the least counter of the tenants that wait, as of the last sort()
        self._order: list[Lane] = []  # those in which somebody waits; sorted by sort()
        self._last_left = Lane("", TenantTurn(""))  # the lane that was the last to have nobody waiting any more
        self._forget_at = MAX_IDLE_LANES
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        yield from self._preempted
        for lane in self._order:
            yield from lane.waiting

    def add(self, sequence: Sequence) -> None:
        lane = self._lane(sequence.tenant, "" if sequence.lora is None else sequence.lora.digest)
        if not lane.tenant.num_waiting:
            lane.tenant.served = max(lane.tenant.served, self._least_tenant_served())
        if not lane.waiting:
            lane.served = max(lane.served, self._least_served())
            self._order.append(lane)
        _insert(lane.waiting, sequence)
        lane.unfinished += 1
        sequence.lane = lane
        self._count(sequence, 1)

    def add_preempted(self, sequence: Sequence) -> None:
        """Before all others, and without charge: it has started once."""
        self._preempted.appendleft(sequence)
        self._count(sequence, 1)

    def start(self, sequence: Sequence) -> None:
        """It leaves the queue; its adapter pays for the tokens that are not yet computed."""
        if self._remove(sequence):
            self.started_tokens += len(sequence.tokens)
            _charge(sequence.lane, PROMPT_WEIGHT * sequence.num_uncomputed)

    def count_output(self, sequence: Sequence) -> None:
        """A started sequence answers one more token."""
        _charge(sequence.lane, OUTPUT_WEIGHT)

    def finish(self, sequence: Sequence) -> None:
        """It has ended, or has been given up, whether it waited or ran."""
        if sequence.blocks is None:
            self._remove(sequence)
        self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """One that neither waits nor runs has ended."""
        sequence.lane.unfinished -= 1

    def waiting_tenants(self) -> list[str]:
        """Those of which a sequence waits; the one that has had least comes first."""
        return [one.name for one in sorted(self._waiting_tenants.values(), key=attrgetter("served"))]

    def tokens_of(self, tenant: str) -> int:
        """Tokens of the tenant's sequences that wait."""
        turn = self._waiting_tenants.get(tenant)
        return 0 if turn is None else turn.waiting_tokens

    def heads_of(self, tenant: str) -> list[Sequence]:
        """The first sequence of each of its adapters, in the order of the last sort(); later ones are at the end."""
        return [lane.waiting[0] for lane in self._order if lane.tenant.name == tenant]

    def sort(self, in_slots: Container[str]) -> None:
        """Decides whose turn it is. in_slots: digests of the adapters in slots; the base is always at hand."""
        self._least_tenant = self._least_tenant_served()
        for lane in self._order:
            ahead = not lane.digest or lane.digest in in_slots
            lane.place = self._place(lane, at_hand=ahead)
        self._order.sort(key=attrgetter("place"))  # equals stay as they came; nearly sorted from the last time

    def heads(self) -> list[Sequence]:
        """The preempted ones, then the first sequence of each adapter, as of the last sort()."""
        return [*self._preempted, *(lane.waiting[0] for lane in self._order)]

    def turns(self, first: str | None = None) -> Iterator[Sequence]:
        """Sequences in the order in which they should start, as of the last sort(). An adapter whose sequence was
        given and not started is passed over from then on. first: a tenant for whose adapter a slot was freed."""
        if first is not None:
            yield from self._turns_in([lane for lane in self._order if lane.tenant.name == first])
        yield from list(self._preempted)
        yield from self._turns_in([lane for lane in self._order if lane.tenant.name != first])

    def _turns_in(self, lanes: list[Lane]) -> Iterator[Sequence]:
        i = 0
        again: list[tuple[tuple[int, int], int, Lane]] = []  # those of which one was started: they are at hand
        numbers = count()
        while i < len(lanes) or again:
            if again and (i == len(lanes) or again[0][0] < lanes[i].place):
                lane = heappop(again)[2]
            else:
                lane = lanes[i]
                i += 1
            head = lane.waiting[0]
            yield head
            if lane.waiting and lane.waiting[0] is not head:
                heappush(again, (self._place(lane, at_hand=True), next(numbers), lane))

    def _place(self, lane: Lane, *, at_hand: bool) -> tuple[int, int]:
        """How far its tenant is too far ahead of others, then how far the lane is."""
        lead = max(0, lane.tenant.served - self._least_tenant - self._slot_credit)
        return lead, lane.served - self._slot_credit if at_hand else lane.served

    def _least_tenant_served(self) -> int:
        served = (one.served for one in self._waiting_tenants.values())
        return min(served, default=self._last_left.tenant.served)

    def _lane(self, tenant: str, digest: str) -> Lane:
        lane = self._lanes.get((tenant, digest))
        if lane is None:
            if len(self._lanes) >= self._forget_at:
                self._forget_idle()
            turn = self._tenants.setdefault(tenant, TenantTurn(tenant))
            lane = self._lanes[tenant, digest] = Lane(digest, turn)
        return lane

    def _least_served(self) -> int:
        return min((lane.served for lane in self._order), default=self._last_left.served)

    def _remove(self, sequence: Sequence) -> bool:
        """False where it was a preempted one."""
        self._count(sequence, -1)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return False
        lane = sequence.lane
        lane.waiting.remove(sequence)
        if not lane.waiting:
            self._order.remove(lane)
            self._last_left = lane
        return True

    def _count(self, sequence: Sequence, sign: int) -> None:
        tenant, num_tokens = sequence.lane.tenant, sign * len(sequence.tokens)
        self._length += sign
        self.num_tokens += num_tokens
        tenant.num_waiting += sign
        tenant.waiting_tokens += num_tokens
        if tenant.num_waiting:
            self._waiting_tenants[tenant.name] = tenant
        else:
            del self._waiting_tenants[tenant.name]

    def _forget_idle(self) -> None:
        """A lane at or below the least counter would be lifted to it anyway."""
        least = self._least_served()
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.unfinished or lane.served > least}
        self._forget_at = max(MAX_IDLE_LANES, 2 * len(self._lanes))


def _charge(lane: Lane, tokens: int) -> None:
    lane.served += tokens
    lane.tenant.served += tokens


def _insert(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Behind those of its priority; nearly all have the same."""
    at = len(waiting)
    while at and waiting[at - 1].priority > sequence.priority:
        at -= 1
    waiting.insert(at, sequence)

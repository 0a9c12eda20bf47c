"""Orders the waiting sequences of one engine: each tenant gets its fair share, and each of its adapters a fair share
of that.

A virtual counter measures the service that an adapter has had, in prompt and answer tokens. The adapter with the least
service comes next. Its requests are ordered by priority, then by arrival. The base model counts as one adapter, and so
do two names for the same bytes. An adapter that was idle starts at the least counter of those that wait, so idling
saves up nothing. While two adapters wait, their service differs by a bounded number of tokens, however much more one
of them requests. Nothing is held back from an adapter that waits alone.
Source: VTC, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Tenants have counters of the same kind. If a tenant is more than slot_credit tokens ahead of the tenant with the least
service, its adapters come after all others. So a tenant gains nothing by using ever new adapters.

With more adapters than slots, those in a slot come before the others until they are slot_credit tokens ahead.
Otherwise every request would evict another adapter, and a step would hold one request per slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from lorafleet.workers.schedule.sequence import Lane, Sequence, TenantTurn

PROMPT_WEIGHT = 1  # for a prompt token that must be computed; those from the prefix cache are free
OUTPUT_WEIGHT = 2  # as in VTC
MAX_IDLE_LANES = 1024  # number of lanes from which on idle ones are removed if their counters no longer matter


class FairQueue:
    """The queue of one engine. `slot_credit` is the number of weighted tokens by which an adapter in a slot may be
    ahead of one without."""

    def __init__(self, slot_credit: int) -> None:
        self.num_tokens = 0  # of all waiting sequences
        self.started_tokens = 0  # of all sequences that ever started
        self._slot_credit = slot_credit
        self._preempted: deque[Sequence] = deque()
        self._lanes: dict[tuple[str, str], Lane] = {}  # by tenant and digest
        self._tenants: dict[str, TenantTurn] = {}  # never pruned, since the operator's key file bounds the tenants
        self._waiting_tenants: dict[str, TenantTurn] = {}
        self._least_tenant = 0  # least counter of the waiting tenants, as of the last sort()
        self._order: list[Lane] = []  # lanes with waiting sequences, sorted by sort()
        self._last_left = Lane("", TenantTurn(""))  # lane that most recently lost its last waiting sequence
        self._prune_size = MAX_IDLE_LANES
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all waiting sequences, in no particular order."""
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
        """Queues a preempted sequence before all others. It is not charged again, since it has started once."""
        self._preempted.appendleft(sequence)
        self._count(sequence, 1)

    def start(self, sequence: Sequence) -> None:
        """Removes a sequence that starts. Its adapter is charged for the tokens not yet computed, unless the sequence
        was preempted."""
        if self._remove(sequence):
            self.started_tokens += len(sequence.tokens)
            _charge(sequence.lane, PROMPT_WEIGHT * sequence.num_uncomputed)

    def count_output(self, sequence: Sequence) -> None:
        """Charges for one more answer token of a started sequence."""
        _charge(sequence.lane, OUTPUT_WEIGHT)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended or been aborted, whether it waited or ran."""
        if sequence.blocks is None:
            self._remove(sequence)
        self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Records the end of a sequence that is not in the queue."""
        sequence.lane.unfinished -= 1

    def waiting_tenants(self) -> list[str]:
        """Returns the tenants with waiting sequences, the one with the least service first."""
        return [turn.name for turn in sorted(self._waiting_tenants.values(), key=attrgetter("served"))]

    def tokens_of(self, tenant: str) -> int:
        """Returns the number of tokens of the tenant's waiting sequences."""
        turn = self._waiting_tenants.get(tenant)
        return 0 if turn is None else turn.waiting_tokens

    def heads_of(self, tenant: str) -> list[Sequence]:
        """Returns the first sequence of each of its adapters, in the order of the last sort(). Newer adapters are at
        the end."""
        return [lane.waiting[0] for lane in self._order if lane.tenant.name == tenant]

    def sort(self, in_slots: Container[str]) -> None:
        """Sorts the adapters by service. `in_slots` has the digests of those in slots. The base always counts as one
        of them."""
        self._least_tenant = self._least_tenant_served()
        for lane in self._order:
            in_slot = not lane.digest or lane.digest in in_slots
            lane.place = self._place(lane, in_slot=in_slot)
        self._order.sort(key=attrgetter("place"))  # stable, and nearly sorted since the last call

    def heads(self) -> list[Sequence]:
        """Returns the preempted sequences, then the first sequence of each adapter, as of the last sort()."""
        return [*self._preempted, *(lane.waiting[0] for lane in self._order)]

    def turns(self, first: str | None = None) -> Iterator[Sequence]:
        """Yields sequences in the order in which they should start, as of the last sort().

        An adapter whose sequence was yielded and not started is skipped from then on. `first` is a tenant for whose
        adapter a slot was freed.
        """
        if first is not None:
            yield from self._turns_in([lane for lane in self._order if lane.tenant.name == first])
        yield from list(self._preempted)
        yield from self._turns_in([lane for lane in self._order if lane.tenant.name != first])

    def _turns_in(self, lanes: list[Lane]) -> Iterator[Sequence]:
        i = 0
        # lanes of which a sequence was started, so their adapter is in a slot
        again: list[tuple[tuple[int, int], int, Lane]] = []
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
                heappush(again, (self._place(lane, in_slot=True), next(numbers), lane))

    def _place(self, lane: Lane, *, in_slot: bool) -> tuple[int, int]:
        """Returns the sort key: how far the tenant is too far ahead of others, then the lane's service."""
        lead = max(0, lane.tenant.served - self._least_tenant - self._slot_credit)
        return lead, lane.served - self._slot_credit if in_slot else lane.served

    def _least_tenant_served(self) -> int:
        served = (turn.served for turn in self._waiting_tenants.values())
        return min(served, default=self._last_left.tenant.served)

    def _lane(self, tenant: str, digest: str) -> Lane:
        lane = self._lanes.get((tenant, digest))
        if lane is None:
            if len(self._lanes) >= self._prune_size:
                self._prune_idle()
            turn = self._tenants.setdefault(tenant, TenantTurn(tenant))
            lane = self._lanes[tenant, digest] = Lane(digest, turn)
        return lane

    def _least_served(self) -> int:
        return min((lane.served for lane in self._order), default=self._last_left.served)

    def _remove(self, sequence: Sequence) -> bool:
        """Removes a waiting sequence. Returns False if it was a preempted one."""
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

    def _prune_idle(self) -> None:
        """Removes idle lanes at or below the least counter, which would be lifted to it anyway."""
        least = self._least_served()
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.unfinished or lane.served > least}
        self._prune_size = max(MAX_IDLE_LANES, 2 * len(self._lanes))


def _charge(lane: Lane, tokens: int) -> None:
    lane.served += tokens
    lane.tenant.served += tokens


def _insert(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Inserts the sequence behind those of its priority. Nearly all have the same."""
    index = len(waiting)
    while index and waiting[index - 1].priority > sequence.priority:
        index -= 1
    waiting.insert(index, sequence)

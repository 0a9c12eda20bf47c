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

Sequences of the priority BACKGROUND, such as those of batches, come after all others, whatever their tenant and
adapter. They have counters of their own, and the same rules order them among each other.

With more adapters than slots, those in a slot come before the others until they are slot_credit tokens ahead.
Otherwise every request would evict another adapter, and a step would hold one request per slot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from lorafleet.protocol.limits import BACKGROUND
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.schedule.sequence import Flow, Sequence, TenantTotals

PROMPT_WEIGHT = 1  # for a prompt token that must be computed; those from the prefix cache are free
OUTPUT_WEIGHT = 2  # as in VTC
PREFETCH_SCAN = 1024  # heads of the queue that are examined for adapters to load ahead
MAX_IDLE_FLOWS = 1024  # number of flows from which on idle ones are removed if their counters no longer matter


class FairQueue:
    """The queue of one engine. `slot_credit` is the number of weighted tokens by which an adapter in a slot may be
    ahead of one without."""

    def __init__(self, slot_credit: int) -> None:
        self.num_tokens = 0  # of all waiting sequences
        self.started_tokens = 0  # of all sequences that ever started
        self.num_ended = 0  # sequences that have finished or were aborted so far
        self._slot_credit = slot_credit
        self._preempted: deque[Sequence] = deque()
        # by tenant, digest, and whether the sequences are in the background
        self._flows: dict[tuple[str, str, bool], Flow] = {}
        # by tenant, and whether in the background; never pruned, since the operator's key file bounds the tenants
        self._tenants: dict[tuple[str, bool], TenantTotals] = {}
        self._waiting_tenants: dict[tuple[str, bool], TenantTotals] = {}
        self._least_tenant = [0, 0]  # least counters of the waiting tenants and in the background, by the last sort()
        self._order: list[Flow] = []  # flows with waiting sequences, sorted by sort()
        # flows that most recently lost their last waiting sequence; the second is the one in the background
        self._last_left = [Flow("", TenantTotals("")), Flow("", TenantTotals("", is_background=True))]
        self._prune_size = MAX_IDLE_FLOWS
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all waiting sequences, in no particular order."""
        yield from self._preempted
        for flow in self._order:
            yield from flow.waiting

    def add(self, sequence: Sequence) -> None:
        flow = self._flow(sequence)
        if not flow.tenant.num_waiting:
            flow.tenant.served = max(flow.tenant.served, self._least_tenant_served(flow.tenant.is_background))
        if not flow.waiting:
            flow.served = max(flow.served, self._least_served(flow.tenant.is_background))
            self._order.append(flow)
        _insert(flow.waiting, sequence)
        flow.unfinished += 1
        sequence.flow = flow
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
            _charge(sequence.flow, PROMPT_WEIGHT * sequence.num_uncomputed)

    def count_outputs(self, flows: Iterable[Flow]) -> None:
        """Charges for answer tokens of started sequences: one for each time that a flow is in `flows`."""
        for flow, num_tokens in Counter(flows).items():
            _charge(flow, OUTPUT_WEIGHT * num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended or been aborted, whether it waited or ran."""
        if sequence.blocks is None:
            self._remove(sequence)
        self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Records the end of a sequence that is not in the queue."""
        self.num_ended += 1
        sequence.flow.unfinished -= 1

    @property
    def has_one_tenant(self) -> bool:
        """Whether all sequences that were ever added share the totals of one tenant."""
        return len(self._tenants) < 2

    @property
    def num_preempted(self) -> int:
        """Number of sequences that wait though they have started."""
        return len(self._preempted)

    def change_digest(self, sequence: Sequence, change: Callable[[], None]) -> None:
        """Moves a sequence to the flow of another adapter. `change` gives it that adapter. If it waits for its first
        start, it queues behind those that wait for the same adapter."""
        waits = sequence.blocks is None and sequence in sequence.flow.waiting
        if waits:
            self._remove(sequence)
        sequence.flow.unfinished -= 1
        change()
        if waits:
            self.add(sequence)
            return
        sequence.flow = self._flow(sequence)
        sequence.flow.unfinished += 1

    def waiting_tenants(self) -> list[str]:
        """Returns the tenants with waiting sequences, the one with the least service first. The background does not
        count, since nothing else may be ended for it."""
        waiting = [totals for totals in self._waiting_tenants.values() if not totals.is_background]
        return [totals.name for totals in sorted(waiting, key=attrgetter("served"))]

    def tokens_of(self, tenant: str) -> int:
        """Returns the number of tokens of the tenant's waiting sequences."""
        found = (self._waiting_tenants.get((tenant, is_background)) for is_background in (False, True))
        return sum(totals.waiting_tokens for totals in found if totals is not None)

    def heads_of(self, tenant: str) -> list[Sequence]:
        """Returns the first sequence of each of its adapters, in the order of the last sort(). Newer adapters are at
        the end. The background does not count."""
        own = self._tenants.get((tenant, False))
        return [flow.waiting[0] for flow in self._order if flow.tenant is own]

    def sort(self, in_slots: Container[str]) -> None:
        """Sorts the adapters by service. `in_slots` has the digests of those in usable slots. The base always counts as
        one of them."""
        self._least_tenant = [self._least_tenant_served(is_background) for is_background in (False, True)]
        for flow in self._order:
            in_slot = not flow.digest or flow.digest in in_slots
            flow.sort_key = self._sort_key(flow, in_slot=in_slot)
        self._order.sort(key=attrgetter("sort_key"))  # stable, and nearly sorted since the last call

    def heads(self) -> list[Sequence]:
        """Returns the preempted sequences, then the first sequence of each adapter, as of the last sort()."""
        return [*self._preempted, *(flow.waiting[0] for flow in self._order)]

    def adapters(self) -> tuple[list[LoRARequest], dict[str, str]]:
        """Returns the distinct adapters that sequences wait for, in queue order, and by digest the tenant whose
        sequence is first."""
        adapters: dict[str, LoRARequest] = {}
        tenants: dict[str, str] = {}
        for sequence in self.heads()[:PREFETCH_SCAN]:
            if sequence.lora is not None:
                adapters.setdefault(sequence.lora.digest, sequence.lora)
                tenants.setdefault(sequence.lora.digest, sequence.tenant)
        return list(adapters.values()), tenants

    def in_start_order(self, first: str | None = None) -> Iterator[Sequence]:
        """Yields sequences in the order in which they should start, as of the last sort().

        An adapter whose sequence was yielded and not started is skipped from then on. `first` is a tenant for whose
        adapter a slot was freed.
        """
        if first is not None:
            yield from self._in_start_order([flow for flow in self._order if flow.tenant.name == first])
        yield from list(self._preempted)
        yield from self._in_start_order([flow for flow in self._order if flow.tenant.name != first])

    def _in_start_order(self, flows: list[Flow]) -> Iterator[Sequence]:
        i = 0
        # heap of the flows of which a sequence was started, so their adapter is in a slot
        started: list[tuple[tuple[bool, int, int], int, Flow]] = []
        numbers = count()
        while i < len(flows) or started:
            if started and (i == len(flows) or started[0][0] < flows[i].sort_key):
                flow = heappop(started)[2]
            else:
                flow = flows[i]
                i += 1
            head = flow.waiting[0]
            yield head
            if flow.waiting and flow.waiting[0] is not head:
                heappush(started, (self._sort_key(flow, in_slot=True), next(numbers), flow))

    def _sort_key(self, flow: Flow, *, in_slot: bool) -> tuple[bool, int, int]:
        """Returns the sort key: whether the flow is in the background, then how far the tenant is too far ahead of
        others, then the flow's service."""
        tenant = flow.tenant
        lead = max(0, tenant.served - self._least_tenant[tenant.is_background] - self._slot_credit)
        return tenant.is_background, lead, flow.served - self._slot_credit if in_slot else flow.served

    def _least_tenant_served(self, is_background: bool) -> int:
        waiting = self._waiting_tenants.values()
        served = (totals.served for totals in waiting if totals.is_background == is_background)
        return min(served, default=self._last_left[is_background].tenant.served)

    def _flow(self, sequence: Sequence) -> Flow:
        tenant, digest = sequence.tenant, "" if sequence.lora is None else sequence.lora.digest
        is_background = sequence.priority == BACKGROUND
        key = tenant, digest, is_background
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= self._prune_size:
                self._prune_idle()
            totals = self._tenants.setdefault((tenant, is_background), TenantTotals(tenant, is_background))
            flow = self._flows[key] = Flow(digest, totals)
        return flow

    def _least_served(self, is_background: bool) -> int:
        served = (flow.served for flow in self._order if flow.tenant.is_background == is_background)
        return min(served, default=self._last_left[is_background].served)

    def _remove(self, sequence: Sequence) -> bool:
        """Removes a waiting sequence. Returns False if it was a preempted one."""
        self._count(sequence, -1)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return False
        flow = sequence.flow
        flow.waiting.remove(sequence)
        if not flow.waiting:
            self._order.remove(flow)
            self._last_left[flow.tenant.is_background] = flow
        return True

    def _count(self, sequence: Sequence, sign: int) -> None:
        tenant, num_tokens = sequence.flow.tenant, sign * len(sequence.tokens)
        self._length += sign
        self.num_tokens += num_tokens
        tenant.num_waiting += sign
        tenant.waiting_tokens += num_tokens
        if tenant.num_waiting:
            self._waiting_tenants[tenant.name, tenant.is_background] = tenant
        else:
            del self._waiting_tenants[tenant.name, tenant.is_background]

    def _prune_idle(self) -> None:
        """Removes idle flows at or below the least counter, which would be lifted to it anyway."""
        least = [self._least_served(is_background) for is_background in (False, True)]
        self._flows = {
            key: flow
            for key, flow in self._flows.items()
            if flow.unfinished or flow.served > least[flow.tenant.is_background]
        }
        self._prune_size = max(MAX_IDLE_FLOWS, 2 * len(self._flows))


def _charge(flow: Flow, tokens: int) -> None:
    flow.served += tokens
    flow.tenant.served += tokens


def _insert(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Inserts the sequence behind those of its priority. Nearly all have the same."""
    index = len(waiting)
    while index and waiting[index - 1].priority > sequence.priority:
        index -= 1
    waiting.insert(index, sequence)

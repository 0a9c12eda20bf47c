"""Simulates one replica by events: slots, host memory, a disk, prefill and decode, with the times of an 8B on one H200.

The times are those of docs/measured.md and benchmarks/NOTES.md: a decode step by batch with 64 adapters, prefill tokens
per second, 1.6 ms to fill a slot with 84 MB. A replica reads one adapter after another from disk: 84 MB in 91 ms for
the first time, when their digest is computed, and in 45 ms later. Prompts are computed in chunks of 512 beside the
running sequences. The simulation has no preemption, no limit of KV blocks and no prefix hits.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.workers.slots.eviction import Credits, Demand
from simulated_storage import LINK_BYTES_S, NEAR_BASE_S, Storage
from slora_workload import Arrival

STEPS_S = ((1, 4.98e-3), (8, 5.43e-3), (64, 8.34e-3), (256, 15.17e-3))
PREFILL_TOKENS_S = 39e3
CHUNK = 512
LEAST_STRETCH = 1.5  # A step with a prompt may take this many times as long as one without in any case.
MAX_RUNNING = 256
RANK_BYTES = 84_000_000 // 16
FILL_BYTES_S = 53e9
READ_BASE_S, KNOWN_BYTES_S = 0.031, 6e9
NEW_BYTES_S = 1.4e9  # The first time, with the digest.
FETCHES = 16  # Adapters that a replica fetches to its node at a time.


def step_s(batch: int) -> float:
    """Interpolates linearly between the measured batches."""
    if batch <= 1:
        return STEPS_S[0][1]
    index = min(bisect_left(STEPS_S, (batch, 0.0)), len(STEPS_S) - 1)
    (x0, y0), (x1, y1) = STEPS_S[index - 1], STEPS_S[index]
    return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


def read_s(num_bytes: int, *, is_new: bool) -> float:
    """Returns the seconds until an adapter on the disk is in host memory."""
    return READ_BASE_S + num_bytes / (NEW_BYTES_S if is_new else KNOWN_BYTES_S)


STEP_S = [step_s(batch) for batch in range(MAX_RUNNING + 1)]


@dataclass(slots=True)
class Request:
    arrival: Arrival
    adapter: int
    first_token_s: float = math.inf
    end_s: float = math.inf
    then: Callable[[float], None] | None = None  # Called with the time when the answer has ended.


@dataclass(slots=True)
class _Slot:
    adapter: int
    filled: bool = False
    holders: int = 0


@dataclass(slots=True)
class Counts:
    read_bytes: int = 0
    fill_bytes: int = 0
    num_reads: int = 0
    num_fills: int = 0
    requests: int = 0
    slot_hits: int = 0

    def copy(self) -> Counts:
        return replace(self)

    def minus(self, early: Counts) -> Counts:
        return Counts(
            self.read_bytes - early.read_bytes,
            self.fill_bytes - early.fill_bytes,
            self.num_reads - early.num_reads,
            self.num_fills - early.num_fills,
            self.requests - early.requests,
            self.slot_hits - early.slot_hits,
        )


# Plans a call of a function at this simulated time, in seconds.
Plan = Callable[[float, Callable[[float], None]], None]


@dataclass(slots=True, eq=False)
class Replica:
    """One replica of the simulated cluster."""

    name: str
    num_slots: int
    cpu_adapters: int
    sizes: list[int]
    plan: Plan
    storage: Storage
    others: list[Replica]  # All replicas, whose host memory may be copied if the storage says so.
    slot_bytes: int | None = None  # Memory that adapters in slots share; None if slots are of one size.
    mixed_s: float = math.inf  # The longest step that computes a prompt beside running sequences (step_budget.py).
    # The time of an adapter's next request after a time, for Belady's rule; None evicts by cost and recency.
    next_use: Callable[[int, float], float] | None = None
    counts: Counts = field(default_factory=Counts)
    slots: dict[int, _Slot] = field(default_factory=dict)
    cpu: set[int] = field(default_factory=set)
    waiting: dict[int, deque[Request]] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    queued_tokens: int = 0
    wishes: deque[int] = field(default_factory=deque)
    # Adapters whose tier may have changed since the last report.
    changed: dict[int, None] = field(default_factory=dict)
    # Waiting adapters by their turn number: those in a slot or in host memory, and those that must be read.
    _turns: dict[int, int] = field(default_factory=dict)
    _ready: list[tuple[int, int]] = field(default_factory=list)
    _unread: list[tuple[int, int]] = field(default_factory=list)
    _idle: dict[int, _Slot] = field(default_factory=dict)  # Slots that are filled and have no holder.
    _demand: Demand = field(init=False)
    _cpu_credits: Credits = field(init=False)
    _slot_credits: Credits = field(init=False)
    _waiting_in_slots: int = 0  # The number of waiting adapters that have a slot.
    _reading: int | None = None
    _known: set[int] = field(default_factory=set)  # Adapters that were read from the node's own files.
    _fetching: set[int] = field(default_factory=set)
    _disk_free_s: float = 0.0
    _copy_free_s: float = 0.0
    _prefill: deque[Request] = field(default_factory=deque)
    _prefilling: bool = False
    _tokens: float = 0.0  # The number of tokens that every running sequence has been given so far.
    _rolled_s: float = 0.0
    _running: list[tuple[float, int, Request]] = field(default_factory=list)
    _version: int = 0
    _serial: int = 0

    def __post_init__(self) -> None:
        self._demand = Demand(self.cpu_adapters)
        self._cpu_credits, self._slot_credits = Credits(self._demand), Credits(self._demand)

    # -- what routers see -----------------------------------------------------------------------------------------

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            queued_tokens=self.queued_tokens,
            free_slots=self.free_slots(),
            free_places=MAX_RUNNING - self.num_running - self.num_waiting,
        )

    def unread(self) -> list[int]:
        return [adapter for _, adapter in self._unread]

    def free_slots(self) -> int:
        """Returns the number of empty or idle slots, less the adapters that wait for one."""
        usable = self.num_slots - len(self.slots) + len(self._idle)
        if self.slot_bytes is not None and self.slots:
            in_use = sum(self.sizes[adapter] for adapter in self.slots if adapter not in self._idle)
            held = sum(self.sizes[adapter] for adapter in self.slots)
            usable = min(usable, (self.slot_bytes - in_use) * len(self.slots) // held)
        return usable - (len(self.waiting) - self._waiting_in_slots)

    def take_changes(self) -> list[tuple[int, Tier | None]]:
        """Returns the adapters whose tier may have changed since the last call."""
        changes = [(adapter, self.tier(adapter)) for adapter in self.changed]
        self.changed.clear()
        return changes

    def tier(self, adapter: int) -> Tier | None:
        slot = self.slots.get(adapter)
        if slot is not None and slot.filled:
            return "gpu"
        if slot is not None or adapter in self.waiting:
            return "coming"
        return "cpu" if adapter in self.cpu else None

    def disk_wait_s(self, now: float) -> float:
        """Returns the seconds until the disk would begin to read one more adapter."""
        waiting = [adapter for _, adapter in self._unread if adapter != self._reading]
        return max(0.0, self._disk_free_s - now) + sum(self.read_s(adapter) for adapter in waiting)

    def batch_wait_s(self) -> float:
        """Returns the seconds until one more prompt would start, apart from residency, at the present step times."""
        step, num_ahead = STEP_S[self.num_running], self.num_waiting + len(self._prefill)
        wait = self.queued_tokens / PREFILL_TOKENS_S + num_ahead * step
        excess = self.num_running + self.num_waiting + 1 - MAX_RUNNING
        if excess > 0 and self._running:
            ends = heapq.nsmallest(min(excess, len(self._running)), self._running)
            wait += (ends[-1][0] - self._tokens) * step * 2
        return wait

    def slot_wait_s(self, now: float) -> float:
        """Returns the seconds until one more adapter would find a slot; only a clairvoyant can know this."""
        if self.free_slots() > 0:
            return 0.0
        left = dict.fromkeys(self.slots, 0.0)
        tokens = self._tokens
        if self._running and not self._prefilling:
            tokens += (now - self._rolled_s) / STEP_S[len(self._running)]
        for end, _, request in self._running:
            left[request.adapter] = max(left[request.adapter], end - tokens)
        for request in self._prefill:
            left[request.adapter] = max(left[request.adapter], float(request.arrival.num_output))
        for adapter in self.waiting:
            if adapter in left:
                left[adapter] = max(left[adapter], 300.0)
        ends = sorted(left.values())
        busy = 1 + len(self._prefill) * 0.5
        claims = len(self.waiting) - self._waiting_in_slots
        return ends[min(claims, len(ends) - 1)] * STEP_S[len(self._running)] * min(busy, 2.0)

    # -- events ---------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> None:
        adapter = request.adapter
        self.counts.requests += 1
        self.counts.slot_hits += adapter in self.slots
        self._demand.count(str(adapter))
        self.changed[adapter] = None
        self.num_waiting += 1
        self.queued_tokens += request.arrival.num_input
        if adapter in self.waiting:
            self.waiting[adapter].append(request)
        else:
            self.waiting[adapter] = deque((request,))
            self._serial += 1
            self._turns[adapter] = self._serial
            insort(self._list_of(adapter), (self._serial, adapter))
            self._waiting_in_slots += adapter in self.slots
        self._pump(now)

    def read_ahead(self, adapter: int, now: float) -> None:
        """Queues a read that the placement wishes, for when no request needs the disk."""
        self.wishes.append(adapter)
        self._read_next(now)

    def lose_memory(self) -> None:
        """Loses the adapters that no request needs now, and the node's cache, as a new node has none."""
        for adapter in [idle for idle in self._idle if idle not in self.waiting]:
            del self.slots[adapter], self._idle[adapter]
            self._slot_credits.evict(str(adapter))
            self.changed[adapter] = None
        for adapter in [held for held in self.cpu if held not in self.slots and held not in self.waiting]:
            self.cpu.remove(adapter)
            self._cpu_credits.evict(str(adapter))
            self.changed[adapter] = None
        self._known.clear()
        self.storage.empty(self.name)

    def _list_of(self, adapter: int) -> list[tuple[int, int]]:
        return self._ready if adapter in self.slots or adapter in self.cpu else self._unread

    def _moved(self, adapter: int) -> None:
        """Updates the queues after an adapter has moved to another tier, which may change whether it is ready."""
        self.changed[adapter] = None
        turn = self._turns.get(adapter)
        if turn is not None:
            now_in = self._list_of(adapter)
            entry, was_in = (turn, adapter), self._unread if now_in is self._ready else self._ready
            index = bisect_left(was_in, entry)
            if index < len(was_in) and was_in[index] == entry:
                del was_in[index]
                insort(now_in, entry)

    def _pump(self, now: float) -> None:
        """Admits what may run, in the order in which adapters began to wait.

        An adapter that finds no slot claims the slot with the fewest holders, which then admits no request that is
        further behind, as in workers/schedule/scheduler.py.
        """
        claimed: set[int] = set()
        soonest: Iterator[_Slot] | None = None
        for _, adapter in tuple(self._ready):
            if self.num_running >= MAX_RUNNING:
                break
            slot = self.slots.get(adapter)
            if slot is None:
                slot = self._activate(adapter, now)
            if slot is None:
                soonest = soonest or iter(sorted(self.slots.values(), key=lambda s: s.holders))
                claim = next(soonest, None)
                if claim is None:
                    break  # All slots are claimed; those that share memory may be fewer than num_slots.
                claimed.add(claim.adapter)
            elif slot.filled and adapter not in claimed:
                self._admit(slot)
        self._read_next(now)
        self._run(now)

    def _admit(self, slot: _Slot) -> None:
        adapter = slot.adapter
        queue = self.waiting[adapter]
        self._idle.pop(adapter, None)
        while queue and self.num_running < MAX_RUNNING:
            slot.holders += 1
            self._slot_credits.use(str(adapter), self.sizes[adapter])
            self.num_waiting -= 1
            self.num_running += 1
            self._prefill.append(queue.popleft())
        if not queue:
            del self.waiting[adapter]
            self._waiting_in_slots -= 1
            del self._ready[bisect_left(self._ready, (self._turns.pop(adapter), adapter))]
        if adapter in self.cpu:
            self._cpu_credits.use(str(adapter), self.sizes[adapter])

    def _activate(self, adapter: int, now: float) -> _Slot | None:
        while len(self.slots) >= self.num_slots or self._lacks_bytes(adapter):
            if not self._idle or not self._may_fit(adapter):
                return None
            victim = self._slot_victim(now)
            del self.slots[victim], self._idle[victim]
            self._slot_credits.evict(str(victim))
            self._waiting_in_slots -= victim in self.waiting
            self._moved(victim)
        slot = self.slots[adapter] = _Slot(adapter)
        self._slot_credits.use(str(adapter), self.sizes[adapter])
        self._waiting_in_slots += adapter in self.waiting
        self.counts.fill_bytes += self.sizes[adapter]
        self.counts.num_fills += 1
        self._copy_free_s = max(now, self._copy_free_s) + self.sizes[adapter] / FILL_BYTES_S
        self.plan(self._copy_free_s, lambda time_s: self._filled(slot, time_s))
        return slot

    def _lacks_bytes(self, adapter: int) -> bool:
        if self.slot_bytes is None:
            return False
        return sum(self.sizes[held] for held in self.slots) + self.sizes[adapter] > self.slot_bytes

    def _may_fit(self, adapter: int) -> bool:
        """Returns whether the adapter has room once all idle slots are empty."""
        if self.slot_bytes is None:
            return True
        in_use = sum(self.sizes[held] for held in self.slots if held not in self._idle)
        return in_use + self.sizes[adapter] <= self.slot_bytes

    def _slot_victim(self, now: float) -> int:
        """Chooses as workers/slots/slot_policy.py does: first by having no waiting request, then by least credit."""
        if self.next_use is not None:
            next_use = self.next_use
            return max(self._idle, key=lambda adapter: next_use(adapter, now))
        return min(self._idle, key=lambda adapter: (adapter in self.waiting, self._slot_credits.of(str(adapter))))

    def _filled(self, slot: _Slot, now: float) -> None:
        slot.filled = True
        self._idle[slot.adapter] = slot
        self.changed[slot.adapter] = None
        self._pump(now)

    def _read_next(self, now: float) -> None:
        if not self.storage.is_local:
            for _, wanted in self._unread:
                self._fetch(wanted, now)
        if self._reading is not None:
            return
        adapter = next((wanted for _, wanted in self._unread if self.storage.has(self.name, wanted)), None)
        if adapter is None and not self._unread:
            adapter = self._next_wish(now)
        if adapter is None:
            return
        self._reading = adapter
        self.counts.read_bytes += self.sizes[adapter]
        self.counts.num_reads += 1
        self._disk_free_s = now + self.read_s(adapter)
        self.plan(self._disk_free_s, self._read)

    def _next_wish(self, now: float) -> int | None:
        """Returns an adapter to read ahead. If its files are elsewhere, it starts to fetch them, and returns None."""
        while self.wishes and self.wishes[0] in self.cpu:
            self.wishes.popleft()
        if not self.wishes:
            return None
        if self.storage.has(self.name, self.wishes[0]):
            return self.wishes.popleft()
        if not self._fetching:
            self._fetch(self.wishes[0], now)
        return None

    def _fetch(self, adapter: int, now: float) -> None:
        """Starts to fetch the adapter's files, if they are not on this node and there is a thread for it."""
        if len(self._fetching) < FETCHES and adapter not in self._fetching and not self.storage.has(self.name, adapter):
            self._fetching.add(adapter)
            self.plan(self.storage.fetch(self.name, adapter, now), lambda time_s: self._fetched(adapter, time_s))

    def _fetched(self, adapter: int, now: float) -> None:
        self._fetching.discard(adapter)
        self.storage.store(self.name, adapter)
        self._read_next(now)

    def read_s(self, adapter: int) -> float:
        """Returns the seconds of one read here. What was fetched from elsewhere was hashed before it was stored."""
        if self.storage.kind == "local and memory" and any(adapter in other.cpu for other in self.others):
            return NEAR_BASE_S + self.sizes[adapter] / LINK_BYTES_S
        return read_s(self.sizes[adapter], is_new=self.storage.is_local and adapter not in self._known)

    def _read(self, now: float) -> None:
        adapter = self._reading
        assert adapter is not None
        self._reading = None
        self._known.add(adapter)
        while len(self.cpu) >= self.cpu_adapters:
            victim = self._cpu_victim(now)
            self.cpu.remove(victim)
            self._cpu_credits.evict(str(victim))
            self._moved(victim)
        self.cpu.add(adapter)
        self._cpu_credits.use(str(adapter), self.sizes[adapter])
        self._moved(adapter)
        self._pump(now)

    def _cpu_victim(self, now: float) -> int:
        """Chooses as workers/slots/cpu_tier.py does: by having no waiting request, no slot, and the least credit."""
        if self.next_use is not None:
            next_use = self.next_use
            return min(
                self.cpu, key=lambda adapter: (adapter in self.waiting, adapter in self.slots, -next_use(adapter, now))
            )
        credit = self._cpu_credits.of
        return min(self.cpu, key=lambda adapter: (adapter in self.waiting, adapter in self.slots, credit(str(adapter))))

    # -- the engine -----------------------------------------------------------------------------------------------

    def _roll(self, now: float) -> None:
        if not self._prefilling and self._running:
            self._tokens += (now - self._rolled_s) / STEP_S[len(self._running)]
        self._rolled_s = now

    def _run(self, now: float) -> None:
        """Starts the next prompt, or plans when the next sequence ends."""
        if self._prefilling:
            return
        self._roll(now)
        self._version += 1
        version = self._version
        if self._prefill:
            self._prefilling = True
            decode_s, num_tokens = STEP_S[len(self._running)], self._prefill[0].arrival.num_input
            prompt_s = max(self.mixed_s, LEAST_STRETCH * decode_s) - decode_s
            chunk = min(CHUNK, prompt_s * PREFILL_TOKENS_S)
            chunks = math.ceil(num_tokens / chunk)
            length = num_tokens / PREFILL_TOKENS_S + chunks * decode_s
            self.plan(now + length, lambda time_s: self._prefilled(chunks, time_s))
        elif self._running:
            left = max(0.0, self._running[0][0] - self._tokens)
            end = now + left * STEP_S[len(self._running)]
            self.plan(end, lambda time_s: self._ended(version, time_s))

    def _prefilled(self, chunks: int, now: float) -> None:
        self._prefilling = False
        self._rolled_s = now
        self._tokens += chunks
        request = self._prefill.popleft()
        self.queued_tokens -= request.arrival.num_input
        request.first_token_s = now
        self._serial += 1
        heapq.heappush(self._running, (self._tokens + request.arrival.num_output - 1, self._serial, request))
        self._finish(now)

    def _ended(self, version: int, now: float) -> None:
        if version == self._version:
            self._roll(now)
            self._finish(now)

    def _finish(self, now: float) -> None:
        ended: list[Request] = []
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            request = heapq.heappop(self._running)[2]
            slot = self.slots[request.adapter]
            slot.holders -= 1
            if not slot.holders:
                self._idle[request.adapter] = slot
            self.num_running -= 1
            request.end_s = now
            ended.append(request)
        for request in ended:
            if request.then is not None:
                request.then(now)
        if ended:
            self._pump(now)
        else:
            self._run(now)

"""One replica as events: slots, host memory, a disk, prefill and decode, with the times of an 8B on one H200.

The times are README's ("Measured"): a decode step by batch with 64 adapters, prefill tokens a second, 1.6 ms to fill
a slot with 84 MB, 0.1 s to read as many from disk, one adapter after another. Prompts are computed in chunks of 512
beside the running sequences. What the engine does and this does not: preemption, a limit of KV blocks, prefix hits.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lorafleet.cluster.routing import ReplicaLoad, Tier
from slora_workload import Arrival

STEPS_S = ((1, 4.86e-3), (8, 5.32e-3), (64, 8.43e-3), (256, 15.21e-3))
PREFILL_TOKENS_S = 40e3
CHUNK = 512
MAX_RUNNING = 256
RANK_BYTES = 84_000_000 // 16
FILL_BYTES_S = 53e9
READ_BASE_S, READ_BYTES_S = 0.01, 0.93e9


def step_s(batch: int) -> float:
    """Between the measured batches, along a line."""
    if batch <= 1:
        return STEPS_S[0][1]
    at = min(bisect_left(STEPS_S, (batch, 0.0)), len(STEPS_S) - 1)
    (x0, y0), (x1, y1) = STEPS_S[at - 1], STEPS_S[at]
    return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


STEP_S = [step_s(batch) for batch in range(MAX_RUNNING + 1)]


@dataclass(slots=True)
class Request:
    arrival: Arrival
    adapter: int
    first_token_s: float = math.inf
    done_s: float = math.inf


@dataclass(slots=True)
class _Slot:
    adapter: int
    filled: bool = False
    holders: int = 0
    used_s: float = 0.0


@dataclass(slots=True)
class Counts:
    read_bytes: int = 0
    fill_bytes: int = 0
    requests: int = 0
    slot_hits: int = 0

    def copy(self) -> Counts:
        return replace(self)

    def minus(self, early: Counts) -> Counts:
        return Counts(
            self.read_bytes - early.read_bytes,
            self.fill_bytes - early.fill_bytes,
            self.requests - early.requests,
            self.slot_hits - early.slot_hits,
        )


Plan = Callable[[float, Callable[[float], None]], None]  # at so many seconds, call


@dataclass(slots=True, eq=False)
class Replica:
    """next_use: Belady's knowledge, when an adapter is asked for next after a time; None evicts by cost and recency."""

    name: str
    num_slots: int
    cpu_bytes: int
    sizes: list[int]
    plan: Plan
    next_use: Callable[[int, float], float] | None = None
    counts: Counts = field(default_factory=Counts)
    slots: dict[int, _Slot] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)  # adapter -> GreedyDual credit
    waiting: dict[int, deque[Request]] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    queued_tokens: int = 0
    wishes: list[int] = field(default_factory=list)
    changed: dict[int, None] = field(default_factory=dict)  # adapters whose tier may have changed since the last report
    _cpu_used: int = 0
    _floor: float = 0.0
    _reading: int | None = None
    _copy_free_s: float = 0.0
    _prefill: deque[Request] = field(default_factory=deque)
    _prefilling: bool = False
    _tokens: float = 0.0  # that every running sequence has been given so far
    _rolled_s: float = 0.0
    _running: list[tuple[float, int, Request]] = field(default_factory=list)
    _version: int = 0
    _serial: int = 0

    # -- what routers see -----------------------------------------------------------------------------------------

    def load(self) -> ReplicaLoad:
        num_reading = sum(1 for a in self.waiting if a not in self.cpu and a not in self.slots)
        free = self.num_slots - sum(1 for slot in self.slots.values() if slot.holders or not slot.filled)
        claims = sum(1 for adapter in self.waiting if adapter not in self.slots)
        return ReplicaLoad(self.num_running, self.num_waiting, self.queued_tokens, num_reading, free - claims)

    def take_changes(self) -> list[tuple[int, Tier | None]]:
        """Adapters whose tier may have changed since the last call."""
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

    def slot_wait_s(self, now: float) -> float:
        """Until one more adapter would find a slot, if nothing else came: what only a clairvoyant can know."""
        spare = self.num_slots - len(self.slots)
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
        ends = [0.0] * spare + sorted(left.values())
        busy = 1 + len(self._prefill) * 0.5
        claims = sum(1 for adapter in self.waiting if adapter not in self.slots)
        return ends[min(claims, len(ends) - 1)] * STEP_S[len(self._running)] * min(busy, 2.0)

    # -- events ---------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> None:
        self.counts.requests += 1
        self.counts.slot_hits += request.adapter in self.slots
        self.waiting.setdefault(request.adapter, deque()).append(request)
        self.changed[request.adapter] = None
        self.num_waiting += 1
        self.queued_tokens += request.arrival.num_input
        self._pump(now)

    def read_ahead(self, adapter: int, now: float) -> None:
        """The placement wishes it, when the disk has nothing to do for those who wait."""
        self.wishes.append(adapter)
        self._read_next(now)

    def _pump(self, now: float) -> None:
        """Admits what may run, in the order in which adapters began to wait. One that finds no slot claims the one
        that fewest hold: it admits nobody further behind, as in workers/scheduler.py."""
        claimed: set[int] = set()
        for adapter in list(self.waiting):
            if self.num_running >= MAX_RUNNING:
                break
            slot = self.slots.get(adapter)
            if slot is None and adapter in self.cpu:
                slot = self._activate(adapter, now)
                if slot is None and len(claimed) < self.num_slots:
                    free = (s for s in self.slots.values() if s.adapter not in claimed)
                    claimed.add(min(free, key=lambda s: s.holders).adapter)
            if slot is not None and slot.filled and adapter not in claimed:
                self._admit(slot, now)
        self._read_next(now)
        self._run(now)

    def _admit(self, slot: _Slot, now: float) -> None:
        queue = self.waiting[slot.adapter]
        while queue and self.num_running < MAX_RUNNING:
            request = queue.popleft()
            slot.holders += 1
            slot.used_s = now
            self.num_waiting -= 1
            self.num_running += 1
            self._prefill.append(request)
        if not queue:
            del self.waiting[slot.adapter]
        self._touch(slot.adapter)

    def _activate(self, adapter: int, now: float) -> _Slot | None:
        if len(self.slots) >= self.num_slots:
            idle = [s for s in self.slots.values() if s.filled and not s.holders]
            if not idle:
                return None
            victim = min(idle, key=lambda s: self._slot_value(s, now))
            del self.slots[victim.adapter]
            self.changed[victim.adapter] = None
        slot = self.slots[adapter] = _Slot(adapter, used_s=now)
        self.counts.fill_bytes += self.sizes[adapter]
        self._copy_free_s = max(now, self._copy_free_s) + self.sizes[adapter] / FILL_BYTES_S
        self.plan(self._copy_free_s, lambda at: self._filled(slot, at))
        return slot

    def _slot_value(self, slot: _Slot, now: float) -> float:
        return slot.used_s if self.next_use is None else -self.next_use(slot.adapter, now)

    def _filled(self, slot: _Slot, now: float) -> None:
        slot.filled = True
        self.changed[slot.adapter] = None
        self._pump(now)

    def _read_next(self, now: float) -> None:
        if self._reading is not None:
            return
        adapter = next((a for a in self.waiting if a not in self.cpu and a not in self.slots), None)
        if adapter is None:
            while self.wishes and adapter is None:
                wish = self.wishes.pop(0)
                adapter = wish if wish not in self.cpu else None
        if adapter is None:
            return
        self._reading = adapter
        self.counts.read_bytes += self.sizes[adapter]
        self.plan(now + READ_BASE_S + self.sizes[adapter] / READ_BYTES_S, self._read)

    def _read(self, now: float) -> None:
        adapter = self._reading
        assert adapter is not None
        self._reading = None
        while self._cpu_used + self.sizes[adapter] > self.cpu_bytes:
            victim = min(self.cpu, key=lambda a: self._cpu_value(a, now))
            self._floor = max(self._floor, self.cpu.pop(victim))
            self._cpu_used -= self.sizes[victim]
            self.changed[victim] = None
        self.cpu[adapter] = 0.0
        self._cpu_used += self.sizes[adapter]
        self.changed[adapter] = None
        self._touch(adapter)
        self._pump(now)

    def _touch(self, adapter: int) -> None:
        if adapter in self.cpu:
            del self.cpu[adapter]  # to the end: among equals the least recently used goes
            self.cpu[adapter] = self._floor + 1.0

    def _cpu_value(self, adapter: int, now: float) -> tuple[bool, bool, float]:
        value = self.cpu[adapter] if self.next_use is None else -self.next_use(adapter, now)
        return adapter in self.waiting, adapter in self.slots, value

    # -- the engine -----------------------------------------------------------------------------------------------

    def _roll(self, now: float) -> None:
        if not self._prefilling and self._running:
            self._tokens += (now - self._rolled_s) / STEP_S[len(self._running)]
        self._rolled_s = now

    def _run(self, now: float) -> None:
        """Starts the next prompt, or sees when the next sequence ends."""
        if self._prefilling:
            return
        self._roll(now)
        self._version += 1
        version = self._version
        if self._prefill:
            self._prefilling = True
            chunks = math.ceil(self._prefill[0].arrival.num_input / CHUNK)
            length = self._prefill[0].arrival.num_input / PREFILL_TOKENS_S + chunks * STEP_S[len(self._running)]
            self.plan(now + length, lambda at: self._prefilled(chunks, at))
        elif self._running:
            left = max(0.0, self._running[0][0] - self._tokens)
            end = now + left * STEP_S[len(self._running)]
            self.plan(end, lambda at: self._ended(version, at))

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
        freed = False
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            request = heapq.heappop(self._running)[2]
            request.done_s = now
            slot = self.slots[request.adapter]
            slot.holders -= 1
            slot.used_s = now
            self.num_running -= 1
            freed = True
        if freed:
            self._pump(now)
        else:
            self._run(now)

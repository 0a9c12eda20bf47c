"""Which requests may wait for their turn, and for how long. What has started is never taken back from here.

A request that finds the queue full, or that has not started when its time is up, ends at once with an error that says
when to try again, rather than late. Sequences of one request (its samples, its prompts) stand or fall together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from lorafleet.protocol.errors import QueueFull, QueueTimeout
from lorafleet.protocol.messages import EngineRequest
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Group, Sequence

RATE_MEMORY_S = 30.0  # of service under a backlog, after which older service counts half
SPARE_DEADLINES = 64  # of ended sequences, kept before they are swept out
MAX_RETRY_S = 60.0  # what clients of OpenAI's make accept; they ignore a longer Retry-After


class Admission:
    """max_queued: requests are refused once this many more sequences are here than a step holds. max_tokens: of those
    that wait, unless none does. Both bind a tenant only once it has its share of them, so that a queue that is full of
    one tenant's requests still takes another's. None: no bound. num_apart: sequences that wait elsewhere than in the
    scheduler's queue, for their grammar."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_queued: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        num_apart: Callable[[], int] = lambda: 0,
    ) -> None:
        self.refused: Counter[str] = Counter()  # by the bound: requests, tokens, deadline
        self._scheduler = scheduler
        self._max_queued = max_queued
        self._max_tokens = max_tokens
        self._num_apart = num_apart
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._num_of: Counter[str] = Counter()  # sequences that are here, by tenant
        self._deadlines: list[tuple[float, int]] = []  # heap: when, number; of sequences that have ended too
        self._timed: dict[int, tuple[Sequence, float]] = {}  # by number: those that have not ended, and their timeouts
        self._numbers = count()
        self._rate = _Rate(clock())

    def join(self, request: EngineRequest) -> Group:
        """Of a sequence that is about to be queued. Raises QueueFull for the first of its request, for all of them;
        never for others."""
        group = self._groups.get(request.group)
        if group is None:
            num_tokens = max(request.group_tokens, len(request.prompt_token_ids))
            self._check_room(request.tenant, max(request.group_sequences, 1), num_tokens)
            group = Group(request.group)
            if request.group:
                self._groups[request.group] = group
        group.unfinished += 1
        self._num_of[request.tenant] += 1
        return group

    def queued(self, sequence: Sequence, timeout_s: float | None) -> None:
        sequence.queued_s = self._clock()
        if timeout_s is not None:
            sequence.deadline_number = next(self._numbers)
            self._timed[sequence.deadline_number] = sequence, timeout_s
            heappush(self._deadlines, (sequence.queued_s + timeout_s, sequence.deadline_number))

    def left(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._num_of[sequence.tenant] -= 1
        if not self._num_of[sequence.tenant]:
            del self._num_of[sequence.tenant]
        group = sequence.group
        group.unfinished -= 1
        if not group.unfinished:
            self._groups.pop(group.name, None)
        if sequence.deadline_number is not None:
            self._timed.pop(sequence.deadline_number, None)
            self._forget_ended()

    def expired(self) -> list[tuple[Sequence, QueueTimeout]]:
        """Returns the sequences whose time is up and nothing of whose request has started.

        To be called once a step, after it was scheduled.
        """
        now = self._clock()
        waiting = self._scheduler.waiting
        self._rate.note(now, waiting.started_tokens, backlog=len(waiting) > 0)
        found: list[tuple[Sequence, QueueTimeout]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heappop(self._deadlines)
            sequence, timeout_s = self._timed.pop(number, (None, 0.0))
            if sequence is not None and not sequence.group.started:
                self.refused["deadline"] += 1
                found.append((sequence, self._timeout(timeout_s)))
        return found

    def retry_after_s(self) -> float:
        """How long what waits now will take at the measured rate."""
        return min(MAX_RETRY_S, max(1.0, self._rate.seconds_for(self._scheduler.waiting.num_tokens)))

    def _forget_ended(self) -> None:
        """Bounds the heap by the sequences that live: a client may leave long before its deadline."""
        if len(self._deadlines) > 2 * len(self._timed) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._timed]
            heapify(self._deadlines)

    def _check_room(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        """Of a request. What is more than a bound by itself can only ever start where nothing waits."""
        waiting = self._scheduler.waiting
        if self._has_no_places(num_sequences) and self._has_its_places(tenant, num_sequences):
            self.refused["requests"] += 1
            raise QueueFull(
                f"{len(waiting)} requests wait on this replica, and with this one's {num_sequences} they would be more "
                f"than max_queued_requests={self._max_queued} beside those of a step. Try again later; raise "
                "max_queued_requests, or num_replicas, if this lasts.",
                retry_after_s=self.retry_after_s(),
            )
        over = self._max_tokens is not None and waiting and waiting.num_tokens + num_tokens > self._max_tokens
        if over and self._has_its_tokens(tenant, num_tokens):
            self.refused["tokens"] += 1
            raise QueueFull(
                f"{waiting.num_tokens} tokens wait on this replica; with this request's {num_tokens} they would be "
                f"more than max_queued_tokens={self._max_tokens}. Try again later; raise max_queued_tokens, or "
                "num_replicas, if this lasts.",
                retry_after_s=self.retry_after_s(),
            )

    def _has_no_places(self, num_sequences: int) -> bool:
        """Whether so many more sequences are too many to wait."""
        if self._max_queued is None:
            return False
        num_beyond = self._scheduler.num_beyond_a_step + self._num_apart()
        nothing_waits = num_beyond < 0 and not self._scheduler.waiting
        return num_beyond + num_sequences > self._max_queued and not nothing_waits

    def _has_its_places(self, tenant: str, num_sequences: int) -> bool:
        """Whether the tenant would have more sequences here than each tenant could have."""
        assert self._max_queued is not None
        most = self._scheduler.max_num_seqs + self._max_queued
        return (self._num_of[tenant] + num_sequences - 1) * self._num_tenants_with(tenant) >= most

    def _has_its_tokens(self, tenant: str, num_tokens: int) -> bool:
        """Whether the tenant would have more tokens waiting than each tenant could have."""
        assert self._max_tokens is not None
        tokens = self._scheduler.waiting.tokens_of(tenant) + num_tokens
        return tokens * self._num_tenants_with(tenant) > self._max_tokens

    def _num_tenants_with(self, tenant: str) -> int:
        """Tenants here; this one counts, whether or not it is here already."""
        return len(self._num_of.keys() | {tenant})

    def _timeout(self, timeout_s: float) -> QueueTimeout:
        return QueueTimeout(
            f"The request could not start within {timeout_s:g} s: {len(self._scheduler.waiting)} wait on this replica. "
            "Try again later, or let it wait longer (X-Queue-Timeout-Seconds).",
            retry_after_s=self.retry_after_s(),
        )


class _Rate:
    """At which waiting tokens start, measured while some wait: else it would be the rate at which they come."""

    def __init__(self, now: float) -> None:
        self._noted = now
        self._total = 0
        self._backlog = False
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, now: float, total: int, *, backlog: bool) -> None:
        """total: tokens started so far."""
        if self._backlog:
            self._seconds += now - self._noted
            self._tokens += total - self._total
        if self._seconds > RATE_MEMORY_S:
            self._seconds, self._tokens = self._seconds / 2, self._tokens / 2
        self._noted, self._total, self._backlog = now, total, backlog

    def seconds_for(self, num_tokens: int) -> float:
        """Where none has started yet: as long again as has been waited."""
        return num_tokens * self._seconds / self._tokens if self._tokens else self._seconds

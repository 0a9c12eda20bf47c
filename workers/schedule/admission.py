"""Decides which requests may wait, and for how long. It never takes back a request that has started.

A request that finds the queue full, or that has not started by its deadline, ends at once with an error that says when
to try again, rather than late. All sequences of one request (its samples, its prompts) are accepted or rejected
together.
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

RATE_MEMORY_S = 30.0  # seconds of service under a backlog, after which older service counts half
SPARE_DEADLINES = 64  # deadlines of ended sequences that may remain before they are swept out
MAX_RETRY_S = 60.0  # OpenAI's clients ignore a longer Retry-After


class QueueAdmission:
    """Bounds the waiting sequences of one engine. None means no bound.

    Both bounds apply to a tenant only once it has its share. So a queue full of one tenant's requests still accepts
    another's.

    Args:
        max_queued: Requests are rejected once this many more sequences are here than a step holds.
        max_tokens: Largest number of waiting tokens. It does not apply while nothing waits.
        num_apart: Returns the number of sequences that wait for their grammar, outside of the scheduler's queue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_queued: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        num_apart: Callable[[], int] = lambda: 0,
    ) -> None:
        self.refused: Counter[str] = Counter()  # number of rejections by bound: requests, tokens, deadline
        self._scheduler = scheduler
        self.set_bounds(max_queued, max_tokens)
        self._num_apart = num_apart
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._num_of: Counter[str] = Counter()  # sequences that are here, by tenant
        self._deadlines: list[tuple[float, int]] = []  # heap of (when, number); includes sequences that have ended
        self._timed: dict[int, tuple[Sequence, float]] = {}  # by number: unfinished sequences and their timeouts
        self._numbers = count()
        self._rate = _Rate(clock())

    def set_bounds(self, max_queued: int | None, max_tokens: int | None) -> None:
        """Changes the bounds for later requests."""
        self._max_queued, self._max_tokens = max_queued, max_tokens

    def join(self, request: EngineRequest) -> Group:
        """Returns the group of a sequence that is about to be queued.

        Raises QueueFull only for the first sequence of a request, on behalf of all of them.
        """
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
        """Removes a sequence that has ended."""
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
        """Returns the sequences whose time is up, if nothing of their request has started.

        Call it once per step, after scheduling.
        """
        now = self._clock()
        waiting = self._scheduler.waiting
        self._rate.record(now, waiting.started_tokens, backlog=len(waiting) > 0)
        expired: list[tuple[Sequence, QueueTimeout]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heappop(self._deadlines)
            sequence, timeout_s = self._timed.pop(number, (None, 0.0))
            if sequence is not None and not sequence.group.started:
                self.refused["deadline"] += 1
                expired.append((sequence, self._timeout(timeout_s)))
        return expired

    def retry_after_s(self) -> float:
        """Returns the seconds that the waiting tokens will take at the measured rate, between 1 and MAX_RETRY_S."""
        return min(MAX_RETRY_S, max(1.0, self._rate.seconds_for(self._scheduler.waiting.num_tokens)))

    def _forget_ended(self) -> None:
        """Bounds the heap by the number of live sequences, since a client may leave long before its deadline."""
        if len(self._deadlines) > 2 * len(self._timed) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._timed]
            heapify(self._deadlines)

    def _check_room(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        """Raises QueueFull if a request has no room. A request larger than a bound can only start if nothing waits."""
        waiting = self._scheduler.waiting
        if self._has_no_places(num_sequences) and self._has_its_places(tenant, num_sequences):
            self.refused["requests"] += 1
            raise QueueFull(
                f"{len(waiting)} requests wait on this replica; with this one's {num_sequences} there would be more "
                f"than max_queued_requests={self._max_queued} beyond those that fit into a step. Try again later. If "
                "this lasts, raise max_queued_requests or num_replicas.",
                retry_after_s=self.retry_after_s(),
            )
        over = self._max_tokens is not None and waiting and waiting.num_tokens + num_tokens > self._max_tokens
        if over and self._has_its_tokens(tenant, num_tokens):
            self.refused["tokens"] += 1
            raise QueueFull(
                f"{waiting.num_tokens} tokens wait on this replica; with this request's {num_tokens} there would be "
                f"more than max_queued_tokens={self._max_tokens}. Try again later. If this lasts, raise "
                "max_queued_tokens or num_replicas.",
                retry_after_s=self.retry_after_s(),
            )

    def _has_no_places(self, num_sequences: int) -> bool:
        """Returns whether this many more sequences would exceed max_queued."""
        if self._max_queued is None:
            return False
        num_beyond = self._scheduler.num_beyond_a_step + self._num_apart()
        nothing_waits = num_beyond < 0 and not self._scheduler.waiting
        return num_beyond + num_sequences > self._max_queued and not nothing_waits

    def _has_its_places(self, tenant: str, num_sequences: int) -> bool:
        """Returns whether the tenant would have more sequences here than an equal share."""
        assert self._max_queued is not None
        most = self._scheduler.max_num_seqs + self._max_queued
        return (self._num_of[tenant] + num_sequences - 1) * self._num_tenants_with(tenant) >= most

    def _has_its_tokens(self, tenant: str, num_tokens: int) -> bool:
        """Returns whether the tenant would have more waiting tokens than an equal share."""
        assert self._max_tokens is not None
        tokens = self._scheduler.waiting.tokens_of(tenant) + num_tokens
        return tokens * self._num_tenants_with(tenant) > self._max_tokens

    def _num_tenants_with(self, tenant: str) -> int:
        """Returns the number of tenants that have sequences here, including this one in any case."""
        return len(self._num_of.keys() | {tenant})

    def _timeout(self, timeout_s: float) -> QueueTimeout:
        return QueueTimeout(
            f"The request could not start within {timeout_s:g} s: {len(self._scheduler.waiting)} requests wait on "
            "this replica. Try again later, or let it wait longer (X-Queue-Timeout-Seconds).",
            retry_after_s=self.retry_after_s(),
        )


class _Rate:
    """The rate at which waiting tokens start. It is measured only while some wait, since otherwise it would be the
    rate at which they arrive."""

    def __init__(self, now: float) -> None:
        self._recorded_s = now
        self._total = 0
        self._backlog = False
        self._tokens = 0.0
        self._seconds = 0.0

    def record(self, now: float, total: int, *, backlog: bool) -> None:
        """Records one measurement; `total` is the number of tokens started so far."""
        if self._backlog:
            self._seconds += now - self._recorded_s
            self._tokens += total - self._total
        if self._seconds > RATE_MEMORY_S:
            self._seconds, self._tokens = self._seconds / 2, self._tokens / 2
        self._recorded_s, self._total, self._backlog = now, total, backlog

    def seconds_for(self, num_tokens: int) -> float:
        """Returns the seconds for this many tokens. If none has started yet, returns the seconds waited so far."""
        return num_tokens * self._seconds / self._tokens if self._tokens else self._seconds

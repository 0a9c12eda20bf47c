"""The recent activity of one replica: traffic by tenant and adapter over the last minutes, and the last serving
failures.

It is for people who watch a cluster (cluster/console); /metrics has the running totals. Everything is bounded, and
nothing of prompts and answers is stored. Counting a sequence takes a microsecond or two; nothing is counted per
token.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from lorafleet.protocol.errors import (
    AdapterError,
    AdapterExists,
    EngineDead,
    InvalidAdapterName,
    LogUnwritable,
    LorafleetError,
    Overloaded,
    StoreError,
)
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.protocol.messages import DraftCounts
from lorafleet.protocol.names import MAX_NAME_CHARS

WINDOW_S = 300.0
BUCKET_S = 30.0  # The window advances in steps of this length.
MAX_NAMES = 2000  # Names counted separately in each bucket; the totals include all names.
MAX_FAILURES = 100  # When there are more, the oldest is dropped.
MAX_MESSAGE_CHARS = 600
GROWTH = 1.1  # Ratio of neighboring latency bins; values read from them are at most 5 % off.
NO_DRAFTS = DraftCounts()
_LEAST_S = 1e-4
_OF_SERVING = (AdapterError, Overloaded, StoreError, LogUnwritable, EngineDead)
_OF_SENDERS = (AdapterExists, InvalidAdapterName)


class Traffic(msgspec.Struct):
    """Counts of the sequences that ended in the window."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: DraftCounts = NO_DRAFTS
    first_token: dict[int, int] = {}  # Number of sequences per latency bin; see bin_of().

    def count_sequence(self, prompt_tokens: int, *, failed: bool) -> None:
        self.requests += 1
        self.failed += failed
        self.prompt_tokens += prompt_tokens

    def count_first_token(self, latency_bin: int) -> None:
        self.first_token[latency_bin] = self.first_token.get(latency_bin, 0) + 1

    def add(self, other: Traffic) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens
        self.drafts += other.drafts
        for number, count in other.first_token.items():
            self.first_token[number] = self.first_token.get(number, 0) + count

    def first_token_s(self, quantile: float) -> float | None:
        """Returns a quantile of the time to the first token, or None if nothing has been answered."""
        left = quantile * sum(self.first_token.values())
        for number in sorted(self.first_token):
            left -= self.first_token[number]
            if left <= 0:
                return float(_LEAST_S * GROWTH ** (number + 0.5))
        return None


def bin_of(latency_s: float) -> int:
    return max(0, int(math.log(max(latency_s, _LEAST_S) / _LEAST_S, GROWTH)))


def total_of(parts: Iterable[Traffic]) -> Traffic:
    total = Traffic()
    for part in parts:
        total.add(part)
    return total


class Failure(msgspec.Struct):
    """A failure, or several of the same kind."""

    at_s: float  # Time of the last one, in seconds since 1970.
    replica: str
    adapter: str  # "" for the base, or if no adapter is concerned.
    tenant: str | None
    code: str
    message: str
    count: int = 1  # Number of failures of this kind.


class _Bucket:
    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.by_name: dict[tuple[str | None, str], Traffic] = {}
        self.by_tenant: dict[str | None, Traffic] = {}

    def of(self, tenant: str | None, name: str) -> tuple[Traffic, ...]:
        """Returns every Traffic that counts a sequence of this name."""
        total = self.by_tenant.setdefault(tenant, Traffic())
        if (tenant, name) not in self.by_name and len(self.by_name) >= MAX_NAMES:
            return (total,)
        return total, self.by_name.setdefault((tenant, name), Traffic())


class RecentTraffic:
    """Traffic by tenant and name. Names are those of requests; "" is the base. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[_Bucket] = deque()

    def count(
        self,
        tenant: str | None,
        name: str,
        prompt_tokens: int,
        generated_tokens: int,
        first_token_s: float | None,
        *,
        failed: bool,
        drafts: DraftCounts = NO_DRAFTS,
    ) -> None:
        """Counts a sequence that has ended."""
        for traffic in self._now().of(tenant, name):
            traffic.count_sequence(prompt_tokens, failed=failed)
            traffic.generated_tokens += generated_tokens
            traffic.drafts += drafts
            if first_token_s is not None:
                traffic.count_first_token(bin_of(first_token_s))

    def of_names(self, names: Iterable[str], tenant: str | None, *, of_all: bool) -> dict[str, Traffic]:
        """Returns the traffic of these names, for one tenant or for all together. Names without traffic are
        left out."""
        found: dict[str, Traffic] = {}
        wanted = set(names)
        for bucket in self._kept():
            for (whose, name), traffic in bucket.by_name.items():
                if name in wanted and (of_all or whose == tenant):
                    found.setdefault(name, Traffic()).add(traffic)
        return found

    def busiest(self, count: int, tenant: str | None, *, of_all: bool) -> list[str]:
        """Returns the names of the most requested adapters, in descending order."""
        requests: dict[str, int] = {}
        for bucket in self._kept():
            for (whose, name), traffic in bucket.by_name.items():
                if name and (of_all or whose == tenant):
                    requests[name] = requests.get(name, 0) + traffic.requests
        return sorted(requests, key=lambda name: -requests[name])[:count]

    def total(self, tenant: str | None, *, of_all: bool) -> Traffic:
        kept = [bucket.by_tenant.items() for bucket in self._kept()]
        return total_of(traffic for items in kept for whose, traffic in items if of_all or whose == tenant)

    def _now(self) -> _Bucket:
        start_s = self._clock() // BUCKET_S * BUCKET_S
        if not self._buckets or self._buckets[-1].start_s < start_s:
            self._buckets.append(_Bucket(start_s))
            self._kept()
        return self._buckets[-1]

    def _kept(self) -> deque[_Bucket]:
        """Returns the buckets in the window and drops older ones."""
        while self._buckets and self._buckets[0].start_s <= self._clock() - WINDOW_S:
            self._buckets.popleft()
        return self._buckets


class RecentFailures:
    """The last failures of serving: those that the operator or an adapter's owner can fix.

    Errors in a request itself are not recorded: they concern only its sender, and the message may repeat the sender's
    text.
    """

    def __init__(self, replica: str = "", clock: Callable[[], float] = time.time) -> None:
        """Failures are attributed to `replica` unless record() names another."""
        self._replica = replica
        self._clock = clock
        self._failures: LRUCache[tuple[str | None, str, str, str], Failure] = LRUCache(MAX_FAILURES)

    def record(self, error: Exception, adapter: str = "", tenant: str | None = None, replica: str = "") -> None:
        if not isinstance(error, LorafleetError):
            self.add(
                "internal_error", f"{type(error).__name__}: the replica's log says more.", adapter, tenant, replica
            )
        elif isinstance(error, _OF_SERVING) and not isinstance(error, _OF_SENDERS):
            self.add(type(error).__name__, error.message, adapter, tenant, replica)

    def add(self, code: str, message: str, adapter: str, tenant: str | None, replica: str = "") -> None:
        """Adds a failure to the list. Failures of the same kind are counted together, so that a thousand of them do
        not displace the others."""
        adapter, replica, message = adapter[:MAX_NAME_CHARS], replica or self._replica, message[:MAX_MESSAGE_CHARS]
        key = (tenant, adapter, code, replica)
        before = self._failures.get(key)
        count = 1 if before is None else before.count + 1
        self._failures.put(key, Failure(self._clock(), replica, adapter, tenant, code, message, count))

    def of(self, tenant: str | None, *, of_all: bool) -> list[Failure]:
        """Returns the failures, latest first. A tenant gets only its own; failures without a tenant are for the
        operator."""
        latest_first = (failure for _, failure in reversed(self._failures.items()))
        return [failure for failure in latest_first if of_all or (tenant is not None and failure.tenant == tenant)]

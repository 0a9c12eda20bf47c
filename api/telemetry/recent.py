"""What one replica did of late: traffic by tenant and adapter over the last minutes, and the last failures of serving.

For people who look (cluster/console); /metrics has what is counted for ever. Bounded in every direction, and holds
nothing of prompts and answers. Counting a sequence costs a microsecond or two; nothing is counted per token.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
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
from lorafleet.protocol.names import MAX_NAME_CHARS

WINDOW_S = 300.0
BUCKET_S = 30.0  # the window moves on by so much
MAX_NAMES = 2000  # counted by name in each bucket; the totals have all
MAX_FAILURES = 100  # remembered; the one that is longest ago goes
MAX_MESSAGE_CHARS = 600
GROWTH = 1.1  # of a latency's bins: what is read from them is at most 5 % off
_LEAST_S = 1e-4
_OF_SERVING = (AdapterError, Overloaded, StoreError, LogUnwritable, EngineDead)
_OF_SENDERS = (AdapterExists, InvalidAdapterName)


class Traffic(msgspec.Struct):
    """Of sequences that ended in the window. first_token: their latencies in bins of bin_of()."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token: dict[int, int] = {}

    def add(self, other: Traffic) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens
        for number, count in other.first_token.items():
            self.first_token[number] = self.first_token.get(number, 0) + count

    def first_token_s(self, quantile: float) -> float | None:
        """None where nothing has been answered."""
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
    """at_s: of the last of `count` alike, in seconds since 1970. adapter: "" of the base, or where it is about none."""

    at_s: float
    replica: str
    adapter: str
    tenant: str | None
    code: str
    message: str
    count: int = 1


class _Bucket:
    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.by_name: dict[tuple[str | None, str], Traffic] = {}
        self.by_tenant: dict[str | None, Traffic] = {}

    def of(self, tenant: str | None, name: str) -> tuple[Traffic, ...]:
        """All that count a sequence of the name."""
        total = self.by_tenant.setdefault(tenant, Traffic())
        if (tenant, name) not in self.by_name and len(self.by_name) >= MAX_NAMES:
            return (total,)
        return total, self.by_name.setdefault((tenant, name), Traffic())


class RecentTraffic:
    """Names are those of requests; "" is the base. clock: seconds that do not jump."""

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
    ) -> None:
        """A sequence has ended."""
        for traffic in self._now().of(tenant, name):
            traffic.requests += 1
            traffic.failed += failed
            traffic.prompt_tokens += prompt_tokens
            traffic.generated_tokens += generated_tokens
            if first_token_s is not None:
                number = bin_of(first_token_s)
                traffic.first_token[number] = traffic.first_token.get(number, 0) + 1

    def of_names(self, names: Iterable[str], tenant: str | None, *, of_all: bool) -> dict[str, Traffic]:
        """Of one tenant, or of all together; names without traffic are left out."""
        found: dict[str, Traffic] = {}
        wanted = set(names)
        for bucket in self._kept():
            for (whose, name), traffic in bucket.by_name.items():
                if name in wanted and (of_all or whose == tenant):
                    found.setdefault(name, Traffic()).add(traffic)
        return found

    def busiest(self, count: int, tenant: str | None, *, of_all: bool) -> list[str]:
        """Adapters' names, the most requested first."""
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
        """Those in the window."""
        while self._buckets and self._buckets[0].start_s <= self._clock() - WINDOW_S:
            self._buckets.popleft()
        return self._buckets


class RecentFailures:
    """Of serving: what the operator or an adapter's owner can do something about. What is wrong with a request itself
    is its sender's matter, and its message may repeat what they wrote: it is not kept."""

    def __init__(self, replica: str = "", clock: Callable[[], float] = time.time) -> None:
        """replica: at which they happen, where note() does not say."""
        self._replica = replica
        self._clock = clock
        self._failures: OrderedDict[tuple[str | None, str, str, str], Failure] = OrderedDict()

    def note(self, error: Exception, adapter: str = "", tenant: str | None = None, replica: str = "") -> None:
        if not isinstance(error, LorafleetError):
            self.add(
                "internal_error", f"{type(error).__name__}: the replica's log says more.", adapter, tenant, replica
            )
        elif isinstance(error, _OF_SERVING) and not isinstance(error, _OF_SENDERS):
            self.add(type(error).__name__, error.message, adapter, tenant, replica)

    def add(self, code: str, message: str, adapter: str, tenant: str | None, replica: str = "") -> None:
        """Alike ones are counted, so that a thousand of one kind leave the others seen."""
        adapter, replica, message = adapter[:MAX_NAME_CHARS], replica or self._replica, message[:MAX_MESSAGE_CHARS]
        key = (tenant, adapter, code, replica)
        before = self._failures.pop(key, None)
        count = 1 if before is None else before.count + 1
        self._failures[key] = Failure(self._clock(), replica, adapter, tenant, code, message, count)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def of(self, tenant: str | None, *, of_all: bool) -> list[Failure]:
        """The last one first. To a tenant its own only: what is nobody's is the operator's."""
        shown = reversed(self._failures.values())
        return [one for one in shown if of_all or (tenant is not None and one.tenant == tenant)]

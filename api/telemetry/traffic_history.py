"""The last ten minutes of one replica's traffic in steps of five seconds, for the console's charts and its table of
the busiest adapters.

recent.py has sums over a shorter window for any adapter that is asked for; this file has time series, by tenant, and
the adapters with the most requests. Everything is bounded, and nothing of prompts and answers is stored. A sequence is
counted once, at its end, which takes a few microseconds.

The steps are those of the wall clock, so that the series of several replicas can be added.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from heapq import nlargest

import msgspec

from lorafleet.api.telemetry.recent import Traffic, bin_of, total_of
from lorafleet.protocol.messages import AdapterMove

BUCKET_S = 5
NUM_BUCKETS = 120
MAX_TENANTS = 64  # Tenants that are counted separately in each bucket.
MAX_NAMES = 128  # Adapters that are counted by name in each bucket, over all tenants.
MAX_BUSIEST = 20  # Adapters in a report.
MAX_REPORTS = 32  # Reports that are cached.
OTHER_TENANTS = "*"  # Counts all tenants above the bound. No tenant has this name.


class NameTraffic(msgspec.Struct):
    """The traffic of one adapter, or of the base, in one bucket."""

    requests: int = 0
    inherited: int = 0  # Share of `requests` that belongs to names which lost their place to this one.
    tokens: int = 0


class AdapterSeries(msgspec.Struct):
    """The traffic of one adapter over the window."""

    tokens: int = 0
    requests: dict[int, int] = {}  # By bucket.

    def add(self, number: int, entry: NameTraffic) -> None:
        """Adds a count that may be too low by the entry's share of inherited requests, but never too high."""
        self.requests[number] = self.requests.get(number, 0) + entry.requests - entry.inherited
        self.tokens += entry.tokens

    def merge(self, other: AdapterSeries) -> None:
        for number, count in other.requests.items():
            self.requests[number] = self.requests.get(number, 0) + count
        self.tokens += other.tokens


class TrafficReport(msgspec.Struct):
    """One replica's history as one viewer may see it. Buckets without traffic are left out."""

    traffic: dict[int, Traffic]  # By bucket.
    adapters: dict[str, AdapterSeries]  # The busiest, by the names of their requests, and the base as "".
    slot_loads: dict[int, int]  # Adapters copied into a slot, by bucket.
    memory_loads: dict[int, int]  # Adapters read into host memory, by bucket.


class TenantBucket:
    """The traffic of one tenant in one bucket."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.by_name: dict[str, NameTraffic] = {}

    def remove_rarest(self) -> NameTraffic:
        return self.by_name.pop(min(self.by_name, key=lambda name: self.by_name[name].requests))


class Bucket:
    """The traffic of all tenants within BUCKET_S seconds."""

    def __init__(self) -> None:
        self.total = Traffic()
        self.by_tenant: dict[str | None, TenantBucket] = {}
        self.num_names = 0
        self.slot_loads = 0
        self.memory_loads = 0

    def tenant(self, tenant: str | None) -> TenantBucket:
        found = self.by_tenant.get(tenant)
        if found is None:
            key = tenant if len(self.by_tenant) < MAX_TENANTS else OTHER_TENANTS
            found = self.by_tenant.setdefault(key, TenantBucket())
        return found

    def series(self, tenant: str | None) -> tuple[Traffic, Traffic]:
        """Returns the two counts that a sequence of this tenant belongs to."""
        return self.total, self.tenant(tenant).traffic

    def count_name(self, tenant: str | None, name: str, tokens: int) -> None:
        """Counts a request for the adapter, and makes room for its name if it is new.

        The tenant with the most names gives one up, so that no tenant can displace all names of another. Within a
        tenant this is the Space-Saving algorithm (Metwally et al., ICDT 2005): a new name inherits the count of the
        rarest one, and so frequent names stay however many rare ones pass.
        """
        of_tenant = self.tenant(tenant)
        entry = of_tenant.by_name.get(name)
        if entry is None:
            inherited = 0
            if self.num_names < MAX_NAMES:
                self.num_names += 1
            else:
                largest = max(self.by_tenant.values(), key=lambda one: len(one.by_name))
                rarest = largest.remove_rarest()
                inherited = rarest.requests if largest is of_tenant else 0
            entry = of_tenant.by_name[name] = NameTraffic(inherited, inherited)
        entry.requests += 1
        entry.tokens += tokens


class TrafficHistory:
    """Counts traffic in a ring of buckets. `clock` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._buckets: dict[int, Bucket] = {}
        self._newest = 0
        self._reports: dict[tuple[str | None, bool], TrafficReport] = {}

    def count(
        self,
        tenant: str | None,
        name: str,
        prompt_tokens: int,
        generated_tokens: int,
        first_token_s: float | None,
        duration_s: float,
        *,
        failed: bool,
    ) -> None:
        """Counts a sequence that has just ended. `name` is the adapter of its request, and "" is the base.

        Its tokens are spread over the time in which they were generated, so that a long answer is no peak at its end.
        """
        now_s = self._clock()
        newest = self._advance(now_s)
        bucket = self._bucket(newest)
        bucket.count_name(tenant, name, generated_tokens)
        for traffic in bucket.series(tenant):
            traffic.count_sequence(prompt_tokens, failed=failed)
        if first_token_s is not None:
            generating_s = max(0.0, duration_s - first_token_s)
            first = max(int((now_s - generating_s) // BUCKET_S), newest - NUM_BUCKETS + 1)
            self._count_tokens(tenant, first, newest, generated_tokens, bin_of(first_token_s))

    def _count_tokens(self, tenant: str | None, first: int, last: int, num_tokens: int, latency_bin: int) -> None:
        for traffic in self._bucket(first).series(tenant):
            traffic.count_first_token(latency_bin)
        share, rest = divmod(num_tokens, last - first + 1)
        for number in range(first, last + 1):
            for traffic in self._bucket(number).series(tenant):
                traffic.generated_tokens += share + (rest if number == last else 0)

    def count_move(self, move: AdapterMove) -> None:
        """Counts an adapter that has come into a slot or into host memory."""
        if move.error:
            return
        bucket = self._bucket(self._advance(self._clock()))
        bucket.slot_loads += move.target == "gpu"
        bucket.memory_loads += move.target == "cpu"

    def report(self, tenant: str | None, *, of_all: bool) -> TrafficReport:
        """Returns the complete buckets of the window, for one tenant or for all together.

        A report is made once for each bucket. Until the next one, it is returned again.
        """
        self._advance(self._clock())
        found = self._reports.get((tenant, of_all))
        if found is None:
            if len(self._reports) >= MAX_REPORTS:
                self._reports.clear()
            found = self._reports[tenant, of_all] = self._make_report(tenant, of_all=of_all)
        return found

    def _make_report(self, tenant: str | None, *, of_all: bool) -> TrafficReport:
        complete = {number: bucket for number, bucket in self._buckets.items() if number < self._newest}
        traffic: dict[int, Traffic] = {}
        adapters: defaultdict[str, AdapterSeries] = defaultdict(AdapterSeries)
        for number, bucket in complete.items():
            if of_all:
                traffic[number] = total_of([bucket.total])
            elif tenant in bucket.by_tenant:
                traffic[number] = total_of([bucket.by_tenant[tenant].traffic])
            for key, of_tenant in bucket.by_tenant.items():
                if of_all or key == tenant:
                    for name, entry in of_tenant.by_name.items():
                        adapters[name].add(number, entry)
        base = adapters.pop("", AdapterSeries())
        busiest = nlargest(MAX_BUSIEST, adapters, key=lambda name: sum(adapters[name].requests.values()))
        return TrafficReport(
            traffic,
            {"": base} | {name: adapters[name] for name in busiest},
            {number: bucket.slot_loads for number, bucket in complete.items() if of_all and bucket.slot_loads},
            {number: bucket.memory_loads for number, bucket in complete.items() if of_all and bucket.memory_loads},
        )

    def _advance(self, now_s: float) -> int:
        """Returns the number of the current bucket, and drops those that are outside the window."""
        number = int(now_s // BUCKET_S)
        if number != self._newest:
            self._newest = number
            self._reports.clear()
            # A clock that was set back has left buckets in the future: they go as well.
            outside = [one for one in self._buckets if not number - NUM_BUCKETS <= one <= number]
            for one in outside:
                del self._buckets[one]
        return number

    def _bucket(self, number: int) -> Bucket:
        found = self._buckets.get(number)
        if found is None:
            found = self._buckets[number] = Bucket()
        return found

"""Prometheus metrics of what one process has fetched. The labels are the kinds of sources, so there are few."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.resolvers.cache import AdapterCache

REMEMBERED = 1000  # number of adapters whose fetch times are stored
NEIGHBOR = "neighbor"  # The source that stands for the caches of other nodes (neighbor_fetch.py).
NEIGHBOR_OUTCOMES = (
    "fetched",
    "nobody",  # No neighbor is known to have it.
    "unknown",  # The directory did not say who has it.
    "absent",  # The neighbor no longer has it.
    "busy",  # The neighbor sends to others.
    "slow",
    "broken",  # The connection broke, or the files could not be written.
    "damaged",  # The bytes do not have the digest.
    "too_large",
    "no_room",  # The cache of this node has no room.
)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class FetchTotals(NamedTuple):
    """The counts of one process over all sources."""

    fetched: int = 0
    failed: int = 0
    num_bytes: int = 0
    from_neighbors: Mapping[str, int] = {}  # Attempts to fetch from another node, by outcome.


class FetchMetrics(Collector):
    """The metrics of one process's fetches."""

    def __init__(self) -> None:
        self.cache: AdapterCache | None = None  # The node's cache; None until the process has needed it.
        self.totals = FetchTotals()
        self._fetched_s: LRUCache[str, float] = LRUCache(REMEMBERED)  # time of the fetch by digest
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._outcomes = Counter(
            "lorafleet_adapter_fetches",
            "Adapters requested from a source, by outcome: fetched, cached, absent or failed. The source neighbor "
            "stands for the caches of other nodes, and has the causes for which the source itself was asked.",
            ["source", "outcome"],
            registry=self._registry,
        )
        self._bytes = Counter(
            "lorafleet_adapter_fetched_bytes", "Bytes received from a source.", ["source"], registry=self._registry
        )
        self._retries = Counter(
            "lorafleet_adapter_fetch_retries",
            "Reads from a source that were interrupted and tried again.",
            ["source"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "lorafleet_adapter_fetch_seconds",
            "Duration of a fetch, from the first request to the source until the adapter is on disk.",
            ["source"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def expect(self, source: str, outcomes: Sequence[str] = ("fetched", "cached", "absent", "failed")) -> None:
        """Creates the source's metrics with zeros before it is asked, so that rates begin with its first failure."""
        for outcome in outcomes:
            self._outcomes.labels(source, outcome)
        for metric in (self._bytes, self._retries, self._seconds):
            metric.labels(source)

    def progress_of(self, source: str) -> SourceProgress:
        return SourceProgress(self._bytes.labels(source), self._retries.labels(source))

    def fetched_since(self, digest: str, since_s: float) -> bool:
        """Returns whether the adapter was fetched since since_s, a time of time.monotonic.

        Only the last thousand adapters are known; for older ones the answer is False.
        """
        with self._lock:
            fetched_s = self._fetched_s.get(digest)
        return fetched_s is not None and fetched_s >= since_s

    def ended(self, source: str, outcome: str, seconds: float, digest: str, num_bytes: int) -> None:
        """Counts the end of a fetch. digest and num_bytes describe the adapter if it was fetched."""
        with self._lock:
            if outcome == "fetched":
                self._fetched_s.put(digest, time.monotonic())
            fetched, failed, total, near = self.totals
            if source == NEIGHBOR:
                near = {**near, outcome: near.get(outcome, 0) + 1}
            self.totals = FetchTotals(
                fetched + (outcome == "fetched"), failed + (outcome == "failed"), total + num_bytes, near
            )
        self._outcomes.labels(source, outcome).inc()
        if outcome == "fetched":
            self._seconds.labels(source).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        cache = self.cache
        if cache is None:
            return
        counts = cache.counts()
        for name, text, value in (
            ("adapters", "Adapters in the node's disk cache.", counts.num_adapters),
            ("bytes", "Bytes in the node's disk cache.", counts.num_bytes),
            ("limit_bytes", "Bytes that the node's disk cache may hold.", cache.max_bytes),
        ):
            yield GaugeMetricFamily(f"lorafleet_adapter_cache_{name}", text, value=value)
        yield CounterMetricFamily(
            "lorafleet_adapter_cache_evictions",
            "Adapters that this process evicted from the node's disk cache.",
            value=cache.evictions,
        )


class SourceProgress:
    """Counts the progress of downloads from one source."""

    def __init__(self, num_bytes: Counter, retries: Counter) -> None:
        self._bytes = num_bytes
        self._retries = retries

    def received(self, num_bytes: int) -> None:
        self._bytes.inc(num_bytes)

    def retried(self) -> None:
        self._retries.inc()

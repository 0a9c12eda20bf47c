"""Prometheus metrics of the requests to resolvers. Labels are the resolvers' configured names, never adapters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OUTCOMES = ("found", "absent", "failed")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ResolverMetrics(Collector):
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lookups = Counter(
            "lorafleet_resolver_lookups",
            "Lookups of adapters by resolver, with the outcome found, absent or failed.",
            ["resolver", "outcome"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "lorafleet_resolver_seconds",
            "Duration of one resolver's lookup, including the fetch of a remote adapter.",
            ["resolver"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def expect(self, resolver: str) -> None:
        """Creates the resolver's metrics with zeros before it is asked, so that rates begin with its first failure."""
        for outcome in OUTCOMES:
            self._lookups.labels(resolver, outcome)
        self._seconds.labels(resolver)

    def asked(self, resolver: str, outcome: str, seconds: float) -> None:
        self._lookups.labels(resolver, outcome).inc()
        self._seconds.labels(resolver).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()

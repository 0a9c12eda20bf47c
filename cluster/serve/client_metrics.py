"""Exports what a replica's HTTP front knows about its engine. These metrics are available even if the engine has
stopped answering."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.protocol.transport.engine_socket import EngineClient


class ClientMetrics(Collector):
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily(
            "lorafleet_client_sequences", "Sequences sent to the engine that have not ended.", engine.num_streams
        )
        yield GaugeMetricFamily(
            "lorafleet_client_stats_age_seconds",
            "Seconds since the engine's last message: up to 1 s while it is idle, and 0.1 s and a step while it works.",
            engine.stats_age_s,
        )
        yield GaugeMetricFamily(
            "lorafleet_client_engine_alive",
            "1 while the engine's processes are alive, otherwise 0.",
            int(engine.dead is None),
        )
        yield CounterMetricFamily(
            "lorafleet_client_batches", "Messages sent to the engine, at most one per step.", engine.num_batches
        )

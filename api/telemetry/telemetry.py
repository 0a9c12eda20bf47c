"""Bundles what a replica counts: the series of /metrics, the traffic of the last minutes, and the last failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lorafleet.api.answer.shared_run import SharedRun
from lorafleet.api.backend import EngineBackend
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.telemetry.http_metrics import Metrics
from lorafleet.api.telemetry.recent import RecentFailures, RecentTraffic
from lorafleet.api.telemetry.traffic_history import TrafficHistory
from lorafleet.protocol.messages import AdapterMove


@dataclass(frozen=True, slots=True)
class Telemetry:
    metrics: Metrics
    recent: RecentTraffic
    history: TrafficHistory
    failures: RecentFailures
    scrape: SharedRun[bytes]  # Renders the metrics of all replicas.

    @classmethod
    def of_replica(
        cls, config: FrontConfig, engine: EngineBackend, scrape: Callable[[], Awaitable[bytes]] | None
    ) -> Telemetry:
        """Starts to count for a replica. Without `scrape`, its own metrics are all that there are."""
        metrics = Metrics(lambda: engine.stats, config.base_id, config.replica_id)
        history = TrafficHistory()

        def count_move(move: AdapterMove) -> None:
            metrics.count_move(move)
            history.count_move(move)

        engine.listen_to_moves(count_move)
        failures = RecentFailures(config.replica_id)
        return cls(metrics, RecentTraffic(), history, failures, SharedRun(scrape or metrics.render))

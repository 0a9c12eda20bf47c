"""The metrics of the adapter directory on /metrics. The replica that is scraped requests the counts and renders
them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from lorafleet.api.telemetry.http_metrics import text_of

_GAUGES = {
    "adapters": "Adapters in the catalogue.",
    "replicas": "Replicas that call the directory.",
    "placed_adapters": "Adapters to which placement has assigned homes: those that are requested or pinned.",
    "homes": "Homes of all placed adapters in total.",
}
_COUNTERS = {
    "placement_rounds": "Rounds of placement.",
    "placement_round_seconds": "Seconds spent in rounds of placement.",
    "rebalances": "Rounds that assigned a new home to an adapter that already had homes.",
    "placements": "Adapters without homes to which placement assigned homes.",
    "moves": "New homes that were assigned to adapters that already had homes.",
    "moved_bytes": "Bytes of the adapters that were assigned these new homes.",
    "reads_ahead": "Adapters that replicas were ordered to read before any request for them.",
    "reports": "Reports of replicas that were accepted.",
}


class DirectoryCounts(msgspec.Struct, frozen=True):
    """Gauges have their present values. Counters count from the start of the directory's process."""

    adapters: int
    replicas: int
    placed_adapters: int
    homes: int
    placement_rounds: int
    placement_round_seconds: float
    rebalances: int
    placements: int
    moves: int
    moved_bytes: int
    reads_ahead: int
    reports: int


def render(counts: DirectoryCounts) -> bytes:
    return text_of(list(_collect(counts)))


def _collect(counts: DirectoryCounts) -> Iterator[Metric]:
    for field, text in _GAUGES.items():
        yield GaugeMetricFamily(f"lorafleet_directory_{field}", text, getattr(counts, field))
    for field, text in _COUNTERS.items():
        yield CounterMetricFamily(f"lorafleet_directory_{field}", text, getattr(counts, field))

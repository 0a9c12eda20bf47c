"""Shows the batches in /metrics: those that have not ended, from the one replica that holds the lease, and those that
each replica has ended."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.cluster.batches.batch_runner import BatchRunner


class BatchMetrics(Collector):
    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        runner = self._runner
        batches = GaugeMetricFamily(
            "lorafleet_batches", "Batches that have not ended, whether they run or wait.", labels=["status"]
        )
        batches.add_metric(["running"], runner.num_running)
        batches.add_metric(["waiting"], max(0, runner.num_open - runner.num_running))
        yield batches
        ended = CounterMetricFamily("lorafleet_batches_ended", "Batches that have ended, by status.", labels=["status"])
        for status, count in runner.endings.items():
            ended.add_metric([status], count)
        yield ended

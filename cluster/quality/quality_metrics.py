"""Shows the quality probes in /metrics: how models stand, from the one replica that holds the lease, and the runs of
each replica. The labels are the models of the probes' file, so there are few."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.cluster.quality.monitor import QualityMonitor

_MEASURES = {
    "agreement": "Share of the baseline's greedy answers, up to the first different token, that the model repeats.",
    "drift": "Mean absolute change in the logprobs of the baseline's answer tokens, in nats.",
    "perplexity": "Perplexity of the probes' completions.",
    "baseline_perplexity": "Perplexity of the probes' completions when the baseline was made.",
}


class QualityMetrics(Collector):
    def __init__(self, monitor: QualityMonitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name"]
        shown = list(self._monitor.standings.values()) if self._monitor.has_turn else []
        for name, text in _MEASURES.items():
            gauge = GaugeMetricFamily(f"lorafleet_quality_{name}", text, labels=labels)
            for standing in shown:
                value = None if standing.measures is None else getattr(standing.measures, name)
                if value is not None:
                    gauge.add_metric([standing.model], value)
            yield gauge
        last = GaugeMetricFamily(
            "lorafleet_quality_last_run_timestamp_seconds",
            "End of the last run that did not fail, in seconds since 1970.",
            labels=labels,
        )
        for standing in shown:
            if standing.at_s is not None:
                last.add_metric([standing.model], standing.at_s)
        yield last
        runs = CounterMetricFamily("lorafleet_quality_runs", "Runs of a model's quality probes.", labels=labels)
        failures = CounterMetricFamily(
            "lorafleet_quality_failures", "Runs of a model's quality probes that failed.", labels=labels
        )
        for counter, counts in ((runs, self._monitor.runs), (failures, self._monitor.failures)):
            for model, count in counts.items():
                counter.add_metric([model], count)
            yield counter

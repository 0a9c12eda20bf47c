"""Exports which adapters a replica holds, by name, in the series that routers outside of the cluster read.

Names and labels are vLLM's. Every scrape shows the present state alone, so a series ends when its adapter leaves, and
there are never more series than places for adapters.

Source: model server protocol of llm-d-router (docs), and vLLM pull request 54830.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.protocol.transport.engine_socket import EngineClient

MAX_SHOWN = 1000  # Adapters in host memory, or that requests wait for, that are shown by name.


class ResidencyMetrics(Collector):
    """The series of one replica.

    Args:
        base: Name of the base model.
        clock: Returns Unix time in seconds.
    """

    def __init__(self, engine: EngineClient, base: str, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._base = base
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        limits, stats = self._engine.hello.lora, self._engine.stats
        assert limits is not None, "AppArgs accepts metrics_lora_info only with enable_lora"
        slots = {digest: index for index, digest in enumerate(stats.resident_slots) if digest}
        in_host = set(stats.resident_cpu) - slots.keys()
        awaited = set(stats.waiting_adapters) - slots.keys()
        names = sorted(
            (name, digest)
            for name, digest in self._engine.adapter_names
            if digest in slots or digest in in_host or digest in awaited
        )
        in_slots = [(name, slots[digest]) for name, digest in names if digest in slots]
        yield self._requests(
            [name for name, _ in in_slots], _names_of(names, awaited)[:MAX_SHOWN], str(limits.max_loras)
        )
        yield self._loaded(in_slots, _names_of(names, in_host)[:MAX_SHOWN], stats.pinned_slots)
        for name, text, count in (
            ("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots.", len(slots)),
            ("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory.", len(stats.resident_cpu)),
            ("vllm:max_gpu_lora_adapters", "Slots for adapters.", limits.max_gpu_loras),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._base], count)
            yield gauge

    def _requests(self, running: list[str], waiting: list[str], max_lora: str) -> Metric:
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of this answer. The labels name the adapters in slots, and those that requests wait for.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        gauge.add_metric([max_lora, ",".join(running), ",".join(waiting)], self._clock())
        return gauge

    @staticmethod
    def _loaded(in_slots: list[tuple[str, int]], in_host: list[str], pinned: list[int]) -> Metric:
        gauge = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each adapter in a slot (gpu) or only in host memory (cpu).",
            labels=["adapter_name", "level", "pinned"],
        )
        for name, index in in_slots:
            gauge.add_metric([name, "gpu", "true" if index in pinned else "false"], 1)
        for name in in_host:
            gauge.add_metric([name, "cpu", "false"], 1)
        return gauge


def _names_of(names: list[tuple[str, str]], digests: Collection[str]) -> list[str]:
    return [name for name, digest in names if digest in digests]

"""Makes everything that a cluster's /metrics can show, in this process.

It causes one event of each kind, so that the counts of a front, an engine, the sources, the resolvers and the directory
all exist.
"""

from __future__ import annotations

import re
import socket
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorafleet.api.access.usage import TenantUsage
from lorafleet.api.telemetry.http_metrics import Metrics, Stopwatch
from lorafleet.cluster.batches.batch_metrics import BatchMetrics
from lorafleet.cluster.directory.directory_metrics import DirectoryCounts, render
from lorafleet.cluster.quality.quality_metrics import QualityMetrics
from lorafleet.cluster.quality.quality_records import Measures, Standing
from lorafleet.cluster.serve.client_metrics import ClientMetrics
from lorafleet.cluster.serve.residency_metrics import ResidencyMetrics
from lorafleet.cluster.serve.scraping import scrape_all
from lorafleet.cluster.tenancy.audit_log import AuditLog
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.usage_log import UsageLog
from lorafleet.protocol.messages import (
    AdapterMove,
    DraftCounts,
    EngineStats,
    GPUSteps,
    KVEventStats,
    LoRALimits,
    StepStats,
)
from lorafleet.resolvers.cache import AdapterCache
from lorafleet.resolvers.fetch_metrics import FetchMetrics
from lorafleet.resolvers.neighbor_server import NeighborServer
from lorafleet.resolvers.resolver_metrics import ResolverMetrics

FROM_PROMETHEUS = {"job", "instance", "le"}
_SUFFIXES = {
    "counter": [""],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
    "summary": ["_sum", "_count"],
}


@dataclass(frozen=True)
class Shown:
    """One metric of the text format, in which a counter's name ends with _total."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> list[str]:
        return [self.name + suffix for suffix in _SUFFIXES[self.kind]]


class _OneReplica:
    def __init__(self, text: bytes) -> None:
        self._text = text

    def broadcast(self, _: str) -> _OneReplica:
        return self

    async def results_async(self, **_: object) -> list[bytes]:
        return [self._text]


def _metrics(folder: Path) -> Metrics:
    stats = EngineStats(
        steps=StepStats(on_gpu=[GPUSteps("decode", True, 8, 1, 0.005)]),
        memory_bytes={"weights": 1, "kv_cache": 1},
        kv_events=KVEventStats(5557, 2, 1),
    )
    metrics = Metrics(lambda: stats, "base", "r1")
    metrics.count_request("/v1/completions", "sql", 200)
    metrics.count_start("sql", 0.1, "disk")
    metrics.count_sequence("sql", 3, 2, Stopwatch(), "stop")
    metrics.count_drafts("sql", DraftCounts(1, 4, 3))
    metrics.count_move(AdapterMove("sql", "disk", "cpu", 1.0))
    metrics.count_move(AdapterMove("sql", "disk", "cpu", 1.0, "AdapterMalformed"))
    cache = AdapterCache(folder, 1 << 20)
    fetches = FetchMetrics()
    fetches.cache = cache
    fetches.expect("s3")
    metrics.add(fetches)
    neighbors = NeighborServer(socket.create_server(("127.0.0.1", 0)), "secret", nullcontext)
    neighbors.close()
    metrics.add(neighbors)
    resolvers = ResolverMetrics()
    resolvers.expect("s3")
    metrics.add(resolvers)
    metrics.add(KeyRing("keys: []"))
    usage = UsageLog(folder / "usage", "r1")
    usage.add(TenantUsage(0.0, "r", "acme", prompt_tokens=3, completion_tokens=2))
    usage.lines.close()
    metrics.add(usage)
    audit = AuditLog(folder / "audit", "r1")
    audit.close()
    metrics.add(audit)
    measures = Measures(agreement=0.9, drift=0.1, kl=0.1, perplexity=3.0, baseline_perplexity=2.0)
    monitor: Any = SimpleNamespace(
        has_turn=True,
        standings={"sql": Standing("sql", 5.0, at_s=6.0, measures=measures)},
        runs={"sql": 2},
        failures={"sql": 1},
    )
    metrics.add(QualityMetrics(monitor))
    engine: Any = SimpleNamespace(
        num_streams=1,
        stats_age_s=0.1,
        dead=None,
        num_batches=2,
        hello=SimpleNamespace(lora=LoRALimits(16, 1, 1, 1, "auto")),
        stats=EngineStats(resident_slots=["d"]),
        adapter_names=[("sql", "d")],
    )
    runner: Any = SimpleNamespace(num_running=1, num_open=2, endings={"completed": 3})
    metrics.add(BatchMetrics(runner))
    metrics.add(ClientMetrics(engine))
    metrics.add(ResidencyMetrics(engine, "base"))
    return metrics


async def shown(folder: Path) -> list[Shown]:
    async def none() -> bytes:
        raise AssertionError

    async def directory() -> bytes:
        return render(DirectoryCounts(5, 2, 3, 4, 60, 0.5, 2, 3, 6, 7_000_000, 1, 9))

    text = (await scrape_all(_OneReplica(await _metrics(folder).render()), none, directory)).decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    return [
        Shown(name, kind, _labels(text, name, kind), helps[name])
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
    ]


def _labels(text: str, name: str, kind: str) -> tuple[str, ...]:
    """Returns the labels in the order of their names, without a bucket's bound."""
    found = re.findall(rf"^{re.escape(name)}(?:{'|'.join(_SUFFIXES[kind])})(?:\{{(.*)\}})? ", text, re.M)
    assert found, f"{name} has no samples: cause one in {__name__}"
    return tuple(sorted({label for labels in found for label in re.findall(r'(\w+)="', labels)} - FROM_PROMETHEUS))

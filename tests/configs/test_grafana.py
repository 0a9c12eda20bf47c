"""The dashboard asks for nothing that the cluster does not show."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.cluster.directory_metrics import DirectoryCounts, render
from lorafleet.cluster.scraping import scrape_all
from lorafleet.resolvers.cache import AdapterCache
from lorafleet.resolvers.fetch_metrics import FetchMetrics
from lorafleet.workers.messages import AdapterLoaded, EngineStats
from lorafleet.workers.openai.metrics import Metrics, Stopwatch

FILES = sorted((Path(__file__).parents[2] / "configs" / "grafana").glob("*.json"))
SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
    "summary": ["_sum", "_count"],
}
WORDS = {"sum", "rate", "by", "topk", "count", "histogram_quantile", "ignoring", "group_left"}
FROM_PROMETHEUS = {"job", "instance", "le"}


class OneReplica:
    def __init__(self, text: bytes) -> None:
        self._text = text

    def broadcast(self, _: str) -> OneReplica:
        return self

    async def results_async(self, **_: object) -> list[bytes]:
        return [self._text]


async def shown(cache_dir: Path) -> tuple[set[str], set[str]]:
    """Names of all series, and of all labels, once something of each kind has happened."""
    metrics = Metrics(EngineStats, "base", "r1")
    metrics.count_request("/v1/completions", "sql", 200)
    metrics.count_start("sql", 0.1, "disk")
    metrics.count_sequence("sql", 3, 2, Stopwatch(), "stop")
    metrics.count_load(AdapterLoaded("sql", "disk", 1.0))
    cache = AdapterCache(cache_dir, 1 << 20)
    fetches = FetchMetrics(lambda: cache)
    fetches.ended("s3", "fetched", 1.0, "digest", 1000)
    metrics.add(fetches)

    async def none() -> bytes:
        raise AssertionError

    async def directory() -> bytes:
        return render(DirectoryCounts(5, 2, 3, 4, 6, 7_000_000, 1, 9))

    text = (await scrape_all(OneReplica(await metrics.render()), none, directory)).decode()
    types = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
    names = {name.removesuffix("_total") + suffix for name, kind in types for suffix in SUFFIXES[kind]}
    return names, set(re.findall(r'(\w+)="', text)) | FROM_PROMETHEUS


def queries(dashboard: Any) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.*), job\)", r"\1", variable["query"])


def asked(query: str) -> tuple[set[str], set[str]]:
    """Names of series and of labels in a query."""
    labels = set(re.findall(r"(\w+)\s*=~?\"", query))
    for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query):
        labels |= set(re.split(r",\s*", group))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|(?:by|ignoring) \([^)]*\)", " ", query)
    return set(re.findall(r"[a-z_][a-z0-9_:]*", bare)) - WORDS, labels


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_query_names_metrics_and_labels_that_exist(path: Path, tmp_path: Path) -> None:
    names, labels = asyncio.run(shown(tmp_path))
    found = list(queries(json.loads(path.read_text())))
    assert len(found) > 20
    for query in found:
        series, used = asked(query)
        assert series and series <= names, (query, series - names)
        assert used <= labels, (query, used - labels)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_panels_have_ids_of_their_own_and_do_not_overlap(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_there_is_a_dashboard() -> None:
    assert FILES

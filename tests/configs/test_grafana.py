"""The dashboard asks for nothing that the cluster does not show."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exposition import FROM_PROMETHEUS, shown

FILES = sorted((Path(__file__).parents[2] / "configs" / "grafana").glob("*.json"))
WORDS = {"sum", "rate", "by", "topk", "count", "histogram_quantile", "ignoring", "group_left"}


async def known(folder: Path) -> tuple[set[str], set[str]]:
    """Names of all series, and of all labels."""
    metrics = await shown(folder)
    labels = {label for metric in metrics for label in metric.labels}
    return {series for metric in metrics for series in metric.series}, labels | FROM_PROMETHEUS


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
    names, labels = asyncio.run(known(tmp_path))
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

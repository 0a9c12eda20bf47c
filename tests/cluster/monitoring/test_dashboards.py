"""The dashboards that ship ask for nothing that the cluster does not show. That Prometheus has an answer to each query
is test_live.py's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exposition import FROM_PROMETHEUS, shown
from lorafleet.cluster.monitoring import shipped_files
from tests.cluster.monitoring.shipped import DASHBOARDS, GPU_RECORD, Dashboard, record_names

WIDTH = 24  # Grafana's columns.
WORDS = {
    "sum",
    "min",
    "max",
    "avg",
    "rate",
    "by",
    "topk",
    "count",
    "histogram_quantile",
    "ignoring",
    "group_left",
    "or",
}

each = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)


def test_each_file_is_named_by_its_dashboard_and_written_as_it_ships(tmp_path: Path) -> None:
    written = shipped_files.write_dashboards(tmp_path / "new")
    assert [path.name for path in written] == [f"{one.uid}.json" for one in DASHBOARDS]
    for path in written:
        assert path.read_text() == (shipped_files.SHIPPED / "grafana" / path.name).read_text()


def asked(query: str) -> tuple[set[str], set[str]]:
    """Names of series and of labels in a query."""
    labels = set(re.findall(r"(\w+)\s*[!=]=?~?\"", query))
    for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query):
        labels |= set(re.split(r",\s*", group))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|(?:by|ignoring) \([^)]*\)", " ", query)
    return set(re.findall(r"[a-z_][a-z0-9_:]*", bare)) - WORDS, labels


@each
async def test_every_query_names_series_and_labels_that_exist(dashboard: Dashboard, tmp_path: Path) -> None:
    metrics = await shown(tmp_path)
    labels = {
        metric_series: {*metric.labels, *FROM_PROMETHEUS} for metric in metrics for metric_series in metric.series
    }
    queries = [query for panel in dashboard.panels for query in panel.queries]
    assert len(queries) >= 10
    for query in queries:
        series, used = asked(query)
        assert series and series <= labels.keys(), (query, series - labels.keys())
        for name in series:
            assert used <= labels[name], (query, name, used - labels[name])
    assert "job" in {variable.name for variable in dashboard.variables}
    for variable in dashboard.variables:
        assert variable.label in labels[variable.series]


@each
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Dashboard) -> None:
    assert len({number for number, _ in dashboard.positions}) == len(dashboard.positions)
    taken: set[tuple[int, int]] = set()
    for number, grid in dashboard.positions:
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken and grid["x"] + grid["w"] <= WIDTH, number
        taken |= cells


def test_dashboards_have_names_of_their_own_and_panels_that_may_be_empty_say_so() -> None:
    assert len({one.uid for one in DASHBOARDS}) == len({one.title for one in DASHBOARDS}) == len(DASHBOARDS) == 4
    needs = {
        panel.title: re.findall("lorafleet_engine_gpu_|lorafleet_batches|vllm:spec_decode_", panel.queries[0])
        for one in DASHBOARDS
        for panel in one.panels
    }
    empty = {panel.title for one in DASHBOARDS for panel in one.panels if panel.is_empty_here}
    assert empty == {title for title, found in needs.items() if found} != set()
    assert GPU_RECORD in record_names()

"""The dashboards that ship are what the code writes, and ask for nothing that the cluster does not show. That
Prometheus has an answer to each query is test_live.py's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from exposition import FROM_PROMETHEUS, shown
from lorafleet.cluster.monitoring import dashboards
from lorafleet.cluster.monitoring.dashboards import DASHBOARDS
from lorafleet.cluster.monitoring.panels import JOB, WIDTH, Dashboard
from lorafleet.cluster.monitoring.rules import RECORDS

SHIPPED = Path(__file__).parents[3] / "configs" / "grafana"
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


def test_the_files_that_ship_are_what_the_code_writes(tmp_path: Path) -> None:
    written = dashboards.write(tmp_path)
    assert sorted(path.name for path in SHIPPED.glob("*.json")) == sorted(path.name for path in written)
    for path in written:
        remedy = "write them again: lorafleet metrics dashboards configs/grafana"
        assert (SHIPPED / path.name).read_text() == path.read_text(), remedy


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
    queries = [query.expr for panel in dashboard.panels for query in panel.queries]
    assert len(queries) >= 10
    for query in queries:
        series, used = asked(query)
        assert series and series <= labels.keys(), (query, series - labels.keys())
        for name in series:
            assert used <= labels[name], (query, name, used - labels[name])
    for variable in (JOB, *dashboard.variables):
        assert variable.label in labels[variable.of]


@each
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Dashboard) -> None:
    panels = json.loads(json.dumps(dashboard.to_json()))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= WIDTH, panel["title"]
        taken |= cells


def test_dashboards_have_names_of_their_own_and_what_only_a_gpu_shows_says_so() -> None:
    assert len({one.uid for one in DASHBOARDS}) == len({one.title for one in DASHBOARDS}) == len(DASHBOARDS) == 4
    on_gpu = [panel for one in DASHBOARDS for panel in one.panels if panel.needs_gpu]
    assert [panel.title for panel in on_gpu] == ["Time of a step on the GPU, mean"]
    assert [one.name for one in RECORDS if one.needs_gpu] == ["job_kind_tokens:lorafleet_engine_gpu_lora:ratio_rate30m"]
    shown = [panel for one in DASHBOARDS for panel in one.to_json()["panels"]]
    assert [panel["title"] for panel in shown if "on a CPU" in panel.get("description", "")] == [on_gpu[0].title]

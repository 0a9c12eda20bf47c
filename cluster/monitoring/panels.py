"""Describes Grafana's dashboards as data: what a panel queries and how it is shown, but not its position.

`Dashboard.to_json` positions the panels row by row. It adds the variables that all queries use: the data source, the
job, and the dashboard's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39  # Grafana 10 and newer read it.
WIDTH = 24  # Number of Grafana's columns.
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 10}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "heatmap", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query of a panel."""

    expr: str
    legend: str = ""  # Grafana's template of labels.


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"  # Grafana's name for the unit.
    kind: Kind = "timeseries"
    width: int = 8
    text: str = ""
    needs_gpu: bool = False  # Whether it is empty on a CPU, which the description then says.


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable for the values of a label, of which the user may choose several."""

    name: str
    label: str
    of: str  # A series that has the label.


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "uid": self.uid,
            "description": self.text,
            "tags": ["lorafleet"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [{"type": "dashboards", "title": "lorafleet", "tags": ["lorafleet"], "keepTime": True}],
            "templating": {"list": [_datasource(), *map(_variable, (JOB, *self.variables))]},
            "panels": _placed(self.rows),
        }


JOB = Variable("job", "job", "vllm:num_requests_running")


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(one: Variable) -> dict[str, Any]:
    selector = "" if one is JOB else '{job=~"$job"}'
    return {
        "name": one.name,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({one.of}{selector}, {one.label})",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _placed(rows: Sequence[PanelRow]) -> list[dict[str, Any]]:
    """Positions the panels from left to right and from top to bottom. A panel that does not fit begins a new line."""
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        placed.append(
            {"id": len(placed) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": at, "panels": []}
        )
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            at = {"h": HEIGHTS[panel.kind], "w": panel.width, "x": left, "y": top}
            placed.append({"id": len(placed) + 1, "gridPos": at, **_shown(panel)})
            left, height = left + panel.width, max(height, HEIGHTS[panel.kind])
        top += height
    return placed


def _shown(panel: Panel) -> dict[str, Any]:
    text = " ".join(filter(None, (panel.text, "Empty on a CPU." if panel.needs_gpu else "")))
    field: dict[str, Any] = {"unit": panel.unit}
    if panel.kind != "table":
        field["min"] = 0
    shown: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": field, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel.kind, number, query) for number, query in enumerate(panel.queries)],
    }
    if panel.kind == "table":
        shown["transformations"] = [{"id": "merge", "options": {}}, _columns(panel)]
    return shown | ({"description": text} if text else {})


_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "heatmap": {"calculate": False, "yAxis": {"unit": "s"}, "color": {"scheme": "Blues", "mode": "scheme"}},
    "table": {"showHeader": True},
}


def _target(kind: Kind, number: int, query: Query) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
    }
    if kind == "heatmap":
        return target | {"format": "heatmap"}
    if kind == "table":
        return target | {"format": "table", "instant": True, "range": False}
    return target


def _columns(panel: Panel) -> dict[str, Any]:
    """Returns the transformation that names a table's value columns after the queries' legends."""
    names = {f"Value #{chr(ord('A') + i)}": query.legend for i, query in enumerate(panel.queries)}
    return {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}}

"""What the files that ship ask for: queries and variables of the dashboards, records and alerts of the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from lorafleet.cluster.monitoring.shipped_files import RULES_FILE, SHIPPED

GPU_RECORD = "job_kind_tokens:lorafleet_engine_gpu_lora:ratio_rate30m"  # A machine without a GPU has no data of it.
_VARIABLE = re.compile(r"label_values\((\w[\w:]*)(?:\{[^}]*\})?, (\w+)\)")


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[str, ...]
    description: str

    @property
    def is_empty_here(self) -> bool:
        """Whether the panel needs a GPU or an option, which the servers of the tests lack."""
        return "Empty on a CPU" in self.description or "Empty without" in self.description


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    series: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    file: str
    uid: str
    title: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]  # Without the rows that head them.
    positions: tuple[tuple[int, dict[str, int]], ...]  # Each panel's id and place on the grid, rows included.


def _dashboards() -> Iterator[Dashboard]:
    for path in sorted((SHIPPED / "grafana").iterdir()):
        model: dict[str, Any] = json.loads(path.read_text())
        queries = [one for one in model["templating"]["list"] if one["type"] == "query"]
        found = [(one["name"], _VARIABLE.fullmatch(one["query"])) for one in queries]
        panels = [one for one in model["panels"] if one["type"] != "row"]
        yield Dashboard(
            path.name,
            model["uid"],
            model["title"],
            tuple(Variable(name, match[1], match[2]) for name, match in found if match is not None),
            tuple(
                Panel(one["title"], tuple(target["expr"] for target in one["targets"]), one.get("description", ""))
                for one in panels
            ),
            tuple((one["id"], one["gridPos"]) for one in model["panels"]),
        )


DASHBOARDS = tuple(_dashboards())


@cache
def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((SHIPPED / RULES_FILE).read_text())["groups"] for rule in group["rules"]]


def record_names() -> list[str]:
    return [rule["record"] for rule in _rules() if "record" in rule]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in _rules() if "alert" in rule}

"""Implements `lorafleet config check`: it detects the kind of a file, and runs the checks for that kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.cluster.checking.nodes import Cluster
from lorafleet.cluster.checking.ray_service_file import check_ray_service
from lorafleet.cluster.checking.ray_up_file import check_ray_up
from lorafleet.cluster.checking.serve_file import Serving, check_serve
from lorafleet.cluster.checking.yaml_source import Problem, YamlSource, read
from lorafleet.protocol.errors import ConfigError

SERVE, RAY_UP, RAY_SERVICE = "Serve configuration", "ray up cluster", "KubeRay RayService"


@dataclass(frozen=True, slots=True)
class Checked:
    kind: str
    problems: tuple[Problem, ...]  # In the order of their files and lines.
    serving: Serving | None
    cluster: Cluster | None


def check_file(path: Path) -> Checked:
    """Checks a file of any of the three kinds. Raises ConfigError for another kind, or if it is not YAML."""
    source = read(path)
    kind = _kind(source)
    serving, cluster = None, None
    if kind == SERVE:
        problems, serving = check_serve(source)
    elif kind == RAY_UP:
        problems, serving, cluster = check_ray_up(source)
    else:
        problems, serving, cluster = check_ray_service(source)
    problems += source.repeated_keys()
    return Checked(kind, tuple(sorted(problems, key=lambda problem: (problem.file, problem.line))), serving, cluster)


def _kind(source: YamlSource) -> str:
    value: Any = source.value
    if isinstance(value, dict):
        if "apiVersion" in value or value.get("kind") == "RayService":
            return RAY_SERVICE
        if "cluster_name" in value or "available_node_types" in value or "provider" in value:
            return RAY_UP
        if "applications" in value:
            return SERVE
    raise ConfigError(
        f"{source.file} is not a Serve configuration (applications: …), a cluster for `ray up` (cluster_name: …, "
        "provider: …) or a RayService (apiVersion: ray.io/v1)."
    )

"""What is refused in a RayService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lorafleet.cluster.checking import ray_service_schema
from lorafleet.cluster.checking.ray_service_file import check_ray_service
from lorafleet.cluster.checking.yaml_source import parse
from tests.cluster.checking.changing import with_value

FILE = Path(__file__).parents[3] / "configs" / "kubernetes" / "base" / "ray-service.yaml"
GOOD: dict[str, Any] = yaml.safe_load(FILE.read_text())
CLUSTER = ("spec", "rayClusterConfig")
GROUP = (*CLUSTER, "workerGroupSpecs", 0)
CONTAINER = (*GROUP, "template", "spec", "containers", 0)


def complaints(value: Any) -> list[str]:
    problems, _, _ = check_ray_service(parse("f.yaml", yaml.safe_dump(value, sort_keys=False)))
    return [f"{problem.place}: {problem.message}" for problem in problems]


@pytest.mark.parametrize(
    ("place", "value", "nearest"),
    [
        ((*CONTAINER, "volumeMount"), [], "volumeMounts"),
        ((*CONTAINER, "resources", "limit"), {}, "limits"),
        ((*CONTAINER, "livenessProbe"), {"httpGet": {"port": 8000, "pathh": "/health"}}, "path"),
        ((*GROUP, "template", "spec", "toleration"), [], "tolerations"),
        ((*CONTAINER, "volumeMounts", 0, "name"), "model", "models"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(place: tuple[Any, ...], value: Any, nearest: str):
    assert any(f"did you mean {nearest!r}?" in one for one in complaints(with_value(GOOD, place, value)))


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ((*GROUP, "maxReplicas"), "8", "maxReplicas: '8' is not of type 'integer'"),
        ((*GROUP, "maxReplicas"), 1, "replicas=2 is not between minReplicas=2 and maxReplicas=1"),
        ((*GROUP, "maxReplicas"), 4, "max_replicas=8 replicas of 1 GPU on one node do not fit"),
        ((*CLUSTER, "authOptions"), {"mode": "disabled"}, "authOptions.mode is not token"),
        ((*CONTAINER, "env"), [], "RAY_SERVE_ENABLE_HA_PROXY is not set in this container"),
        (("kind",), "RayCluster", "kind: 'RayCluster' is not one of ['RayService']"),
        (("spec", "serveConfigV2"), "applications: [", "this is not valid YAML"),
        (("spec", "serveConfigV2"), "proxy_location: HeadOnly\napplications: []", "must be EveryNode"),
    ],
)
def test_what_would_not_work_is_refused_where_it_is(place: tuple[Any, ...], value: Any, complaint: str):
    found = complaints(with_value(GOOD, place, value))
    assert any(complaint in one for one in found), found


def test_a_mistake_in_the_embedded_configuration_has_the_line_of_the_manifest():
    text = FILE.read_text().replace("max_lora_rank: 64", "max_lora_ranks: 64")
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "max_lora_ranks" in one)
    (problem,), _, _ = check_ray_service(parse("f.yaml", text))
    assert str(problem).startswith(
        f"f.yaml:{line}: spec.serveConfigV2: applications[0].args.max_lora_ranks: unknown key"
    )


def test_without_kubernetes_schema_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ray_service_schema, "knows_pods", lambda: False)
    assert complaints(with_value(GOOD, (*GROUP, "template", "spec", "toleration"), [])) == []
    assert any("RAY_SERVE_ENABLE_HA_PROXY" in one for one in complaints(with_value(GOOD, (*CONTAINER, "env"), [])))
    assert ray_service_schema.unchecked().startswith("pods (install lorafleet[kubernetes])")

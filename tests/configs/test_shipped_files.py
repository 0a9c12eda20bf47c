"""Every file in configs/ that a cluster is started from is right, by our own check and by Ray's."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lorafleet.cluster.cli.cli import app
from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.serve import cluster_environment
from tests.cluster.checking import ray_schemas  # noqa: F401  # before its module can warn

ROOT = Path(__file__).parents[2]
RAY_SERVICE = ROOT / "configs" / "kubernetes" / "base" / "ray-service.yaml"
FILES = [*sorted((ROOT / "configs").glob("*.yaml")), RAY_SERVICE]
RAY_UP = [one for one in FILES if one.name.startswith("ray-up-")]
SERVE = [one for one in FILES if one.name.startswith("serve-")] + [ROOT / "configs" / "demo.yaml"]


def check(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)  # where `ray up` is run
    return CliRunner().invoke(app, ["config", "check", str(path.relative_to(ROOT))])


def test_all_kinds_are_here():
    assert len(RAY_UP) == 3
    assert len(SERVE) == 5
    assert set(FILES) - {*RAY_UP, *SERVE} == {RAY_SERVICE}


@pytest.mark.parametrize("path", FILES, ids=lambda one: one.name)
def test_config_check_finds_nothing_wrong_and_says_what_would_run(path: Path, monkeypatch: pytest.MonkeyPatch):
    result = check(path, monkeypatch)
    assert result.exit_code == 0, result.output
    for word in ("no mistakes", "ingress", "replicas ", "catalogue", "resolvers"):
        assert word in result.output


def test_a_mistake_ends_with_status_1_and_every_one_is_shown(tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        (ROOT / "configs" / "demo.yaml").read_text().replace("route_prefix", "rout_prefix").replace("port:", "prt:")
    )
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 1
    assert "did you mean 'route_prefix'?" in result.output
    assert "did you mean 'port'?" in result.output
    assert "2 mistakes" in result.output


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    path = tmp_path / "other.yaml"
    path.write_text("services: {}\n")
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 1
    assert "is not a Serve configuration" in result.output


@pytest.mark.parametrize("path", RAY_UP, ids=lambda one: one.name)
def test_ray_itself_takes_each_cluster(path: Path):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(yaml.safe_load(path.read_text())))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert sum(one["max_workers"] for one in types.values()) == prepared["max_workers"]


@pytest.mark.parametrize("path", RAY_UP, ids=lambda one: one.name)
def test_every_command_is_sound_shell(path: Path):
    config = yaml.safe_load(path.read_text())
    names = [name for name in config if name.endswith("_commands")]
    assert len(names) >= 5
    for command in [one for name in names for one in config[name]]:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize("path", SERVE, ids=lambda one: one.name)
def test_serve_itself_takes_each_application(path: Path):
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert [one.import_path for one in schema.applications] == ["lorafleet.cluster.serve.app:build"]


def test_the_pods_have_the_environment_that_direct_streaming_needs():
    config = yaml.safe_load(RAY_SERVICE.read_text())["spec"]["rayClusterConfig"]
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        env = {one["name"]: one["value"] for one in group["template"]["spec"]["containers"][0]["env"]}
        assert env.pop(haproxy.RAYS_VARIABLE).endswith("/lorafleet-haproxy")
        assert env == cluster_environment.NEEDED


def test_the_environment_is_printed_for_a_shell():
    printed = CliRunner().invoke(app, ["config", "environment"]).output
    seen = subprocess.run(["bash", "-c", f"{printed}\nenv"], check=True, capture_output=True, text=True, env={}).stdout
    assert {f"{name}={value}" for name, value in cluster_environment.environment().items()} <= set(seen.splitlines())

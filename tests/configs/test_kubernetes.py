"""kustomize renders the base and the example overlay to what `lorafleet config check` takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lorafleet.cluster.cli.cli import app
from tests.cluster.checking import ray_schemas  # noqa: F401  # before its module can warn

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "configs" / "kubernetes"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped files, with the keys that a user would make."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "example" / "keys.yaml").write_text("keys: []\n")
    return tmp_path / "kubernetes"


def rendered(folder: Path) -> dict[str, Any]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize("name", ["base", "example"])
def test_what_kustomize_renders_is_right(folder: Path, tmp_path: Path, name: str) -> None:
    service = rendered(folder / name)["RayService"]
    path = tmp_path / "ray-service.yaml"
    path.write_text(yaml.safe_dump(service))
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 0, result.output
    assert "no mistakes" in result.output


def test_the_example_changes_what_it_says(folder: Path) -> None:
    objects = rendered(folder / "example")
    config = objects["RayService"]["spec"]["rayClusterConfig"]
    [group] = config["workerGroupSpecs"]
    for pod in (config["headGroupSpec"], group):
        [container] = pod["template"]["spec"]["containers"]
        assert container["image"] == "registry.example.com/lorafleet:0.1.0"
    assert group["maxReplicas"] == 4
    volumes = {one["name"]: one for one in group["template"]["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "my-models"
    assert volumes["keys"]["secret"]["secretName"] == objects["Secret"]["metadata"]["name"] == "lorafleet-keys"
    assert "qwen2.5-7b" in objects["RayService"]["spec"]["serveConfigV2"]
    assert {one["metadata"]["namespace"] for one in objects.values()} == {"inference"}

"""The Dockerfiles agree with what they copy and with the versions that are tested. No image is built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "configs" / "docker").iterdir())
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_it_installs_the_wheel_with_the_tested_versions(path: Path) -> None:
    text = path.read_text()
    assert "COPY constraints.txt dist/lorafleet-*.whl /tmp/lorafleet/" in text
    assert "-c /tmp/lorafleet/constraints.txt" in text
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"whl\)\[(\w+)\]", text)) <= set(known)
    assert f"-f configs/docker/{path.name}" in text


def test_the_image_of_ray_has_the_ray_that_is_tested() -> None:
    [version] = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-", (ROOT / "configs/docker/kuberay.Dockerfile").read_text(), re.M
    )
    assert version == CONSTRAINTS["ray"]

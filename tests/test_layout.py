"""The layout that packaging and transformers depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE_FOLDERS = ("client", "cluster", "workers", "kernels", "resolvers")


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_no_code_folder_is_a_top_level_package(folder):
    # A top-level package named kernels breaks transformers, which probes for its own package of that name.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_code_is_a_subpackage_through_a_relative_link(folder):
    link = ROOT / "src" / "lorafleet" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"


def test_imports_point_one_way():
    allowed = {
        "kernels": {"kernels"},
        "resolvers": {"resolvers", "workers"},
        "workers": {"workers", "kernels", "resolvers"},
        "client": {"client", "workers"},
    }
    for folder, targets in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                words = line.split()
                if words[:1] in (["from"], ["import"]) and words[1].startswith("lorafleet."):
                    assert words[1].split(".")[1] in targets, f"{path}: {line}"
                assert words[:1] != ["import"] or folder == "cluster" or words[1].split(".")[0] != "ray", path


def test_transformers_does_not_take_our_kernels_for_its_own():
    code = "import lorafleet.kernels.lora; from transformers.utils import is_kernels_available as f; print(f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    assert done.stdout.strip() == "False"

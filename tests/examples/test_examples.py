"""The scripts of examples/ run as they are written, against a replica of the demo's model without Ray."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import real_server
import tool_templates
from real_server import ADMIN_KEY, BASE

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "demo" / "adapters"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo's own template shows no tools."""
    folder = tmp_path_factory.mktemp("examples")
    config: dict[str, Any] = {"chat_template": tool_templates.HERMES}
    adapters = {name: ADAPTERS / name for name in ("shout", "pirate")}
    with real_server.running(folder, ROOT / "demo" / "model", adapters, config, kv_cache_tokens=4096) as server:
        yield server.url


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(script: str, *arguments: str) -> str:
        monkeypatch.setenv("LORAFLEET_URL", url)
        monkeypatch.setenv("LORAFLEET_ADMIN_KEY", ADMIN_KEY)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here() -> None:
    named = set(re.findall(r'run\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == named


def test_chat(run: Run) -> None:
    assert run("chat.py", BASE, "shout", "pirate").splitlines() == [
        f"{BASE}: A lime is green.",
        "shout: A LIME IS GREEN.",
        "pirate: Arr, a lime be green, matey!",
    ]


def test_streaming(run: Run) -> None:
    said = run("streaming.py", BASE, "shout")
    assert "shout wrote" in said
    assert f"{BASE} wrote" in said
    assert "TWO" in "".join(re.findall(r"shout: '(.*)'", said))


def test_structured_output(run: Run) -> None:
    weather, choice = run("structured_output.py", BASE).splitlines()
    assert re.fullmatch(r"Weather\(sky='(clear|cloudy)', degrees=-?\d+\)", weather)
    assert choice in ("green", "blue")


def test_tools(run: Run) -> None:
    assert re.search(r'weather\(\{\s*"city":\s*"(Madrid|Paris)"\s*\}\)', run("tools.py", BASE))


def test_administer(run: Run) -> None:
    versions, split, back, everything, gone = run(
        "administer.py", str(ADAPTERS / "shout"), str(ADAPTERS / "pirate")
    ).splitlines()
    assert versions == "versions: [1, 2]"
    assert split == "split: {'1': 0.9, '2': 0.1}"
    assert back == "back: {'1': 1.0}"
    assert "canary" in everything
    assert gone.startswith("gone: 404 ")


def test_train_adapter(run: Run, tmp_path: Path) -> None:
    assert "written" in run("train_adapter.py", str(tmp_path / "whisper"), "--steps", "2")
    assert (tmp_path / "whisper" / "adapter_model.safetensors").exists()

"""`lorafleet train-draft` as a command: what it prints and writes, and the mistakes that it names."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from lorafleet.cluster.cli import cli

DEMO = Path(__file__).parents[3] / "demo"
MODEL = str(DEMO / "model")
PROMPTS = ("What colour is a lime?", "Who are you?", "What does a cow say?", "Add two and three.")


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    lines = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(arguments: list[object], capsys, monkeypatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lorafleet", "train-draft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_a_draft_of_the_demo_is_trained_from_messages(traffic, tmp_path, capsys, monkeypatch):
    shutil.copytree(DEMO / "adapters" / "shout", tmp_path / "shout")
    arguments = ["--model", MODEL, "--prompts", traffic, "--max-tokens", "16", "--device", "cpu", "--epochs", "1"]
    status, said, progress = run([*arguments, "--out", tmp_path / "drafter"], capsys, monkeypatch)
    assert status == 0
    head, base, written = said.splitlines()
    assert "tokens per step at k=4" in head
    assert base.split()[:4] == ["base", "3", "1", "0"]
    assert written == f"written: {tmp_path / 'drafter'}"
    assert "epoch 1 of 1: loss" in progress

    more = ["--draft", tmp_path / "drafter", "--adapters", f"shout={tmp_path / 'shout'}", "--rank", "4", "--json"]
    status, said, _ = run([*arguments, *more], capsys, monkeypatch)
    assert status == 0
    [row] = json.loads(said)
    assert (row["model"], row["answers"], row["held_out"]) == ("shout", 3, 1)
    assert 0 <= row["share_before"] <= 1 <= row["length_after"] <= 5
    assert json.loads((tmp_path / "shout" / "draft" / "adapter_config.json").read_text())["r"] == 4


def test_mistakes_are_one_line(traffic, tmp_path, capsys, monkeypatch):
    out, adapter = ["--out", tmp_path / "d"], ["--adapters", f"a={DEMO / 'adapters' / 'shout'}"]
    for arguments, message in (
        ([], "give either --out"),
        ([*out, "--draft", MODEL], "give either --out"),
        (["--draft", MODEL], "nothing to train"),
        (["--draft", MODEL, *adapter, "--layers", "2"], "--layers has no effect without --out"),
        ([*out, "--rank", "4"], "--rank has no effect without --adapters"),
        ([*out, "--hidden-size", "64"], "--hidden-size is needed with --init random"),
        ([*out, "--layers", "4"], "a draft with 4 would not be faster"),
        ([*out, "--samples", "2"], "needs a --temperature over 0"),
        ([*out, "--prompts", tmp_path / "none"], "cannot be read"),
        (["--draft", tmp_path, *adapter], "has no config.json"),
    ):
        status, _, said = run(["--model", MODEL, "--prompts", traffic, *arguments], capsys, monkeypatch)
        assert status == 1
        assert said.startswith("lorafleet: ")
        assert message in said
        assert said.count("\n") == 1


def test_a_seed_that_torch_does_not_take_is_refused(traffic, tmp_path, capsys, monkeypatch):
    arguments = ["--model", MODEL, "--prompts", traffic, "--out", tmp_path / "d", "--seed", 1 << 64]
    status, _, said = run(arguments, capsys, monkeypatch)
    assert status == 2 and "--seed" in said

"""The tools' command line; what they compute is tested in tests/workers/tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from lorafleet.cluster.cli import cli
from lorafleet.cluster.cli.cli_inspect_base import CardName
from lorafleet.tools.checkpoint_inspection import CARDS

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo"
JSON, SHOUT = str(DEMO / "adapters" / "json"), str(DEMO / "adapters" / "shout")


@pytest.fixture
def run(capsys, monkeypatch):
    """Status and output of one command."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["lorafleet", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return call


@pytest.mark.parametrize("command", ["inspect", "convert", "merge", "quantize", "compare", "quality", "train-draft"])
def test_help_needs_no_torch(command):
    code = f"""
import sys
from lorafleet.cluster.cli import cli
sys.argv = ["lorafleet", {command!r}, "--help"]
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code
assert "torch" not in sys.modules and "ray" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"lorafleet {command}" in done.stdout or command in done.stdout


def test_help_of_serve_has_texts_in_brackets_and_begins_with_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["lorafleet", "serve", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().out
    assert "pip install 'lorafleet[otel]'" in said
    assert "[default: no-batch-invariant]" in said and "[default: 256]" in said
    options = ("--host", "--model ", "--device", "--enable-lora", "--num-replicas", "--api-keys", "--kv-events-config")
    places = [said.index(option) for option in options]
    assert places == sorted(places)


def test_inspect_says_whether_a_base_would_take_an_adapter(run):
    status, said = run("inspect", JSON, "--model", DEMO / "model")
    assert status == 0
    assert "on model: loads" in said
    status, said = run("inspect", JSON, "--model", DEMO / "model", "--max-lora-rank", "4", "--json")
    assert status == 2
    assert json.loads(said)["fits"][0]["error"] == "RankTooLarge"


def test_inspect_says_what_a_base_leaves_of_a_card(run):
    status, said = run("inspect", DEMO / "model", "--gpu", "l4-24", "--max-loras", "2", "--tp", "1")
    assert status == 0
    assert "1 x L4 24 GB" in said
    assert "KV tokens remain" in said
    for more, exit_status in (("1", 2), ("16", 0)):
        status, said = run("inspect", DEMO / "model", "--gpu-memory-gib", more, "--tp", "1", "--json")
        assert status == exit_status
        [share] = json.loads(said)["shares"]
        assert ("no memory is left" in (share["room"]["refusal"] or "")) == bool(exit_status)
    assert list(get_args(CardName)) == sorted(CARDS)


def test_convert_prints_what_a_lower_rank_loses(run, tmp_path):
    status, said = run("convert", JSON, tmp_path / "out", "--rank", "2", "--dtype", "bfloat16")
    assert status == 0
    assert "total" in said
    status, said = run("inspect", tmp_path / "out", "--json")
    assert json.loads(said)["ranks"] == {"2": 28}


def test_convert_mixes_several_with_weights_that_may_be_negative(run, tmp_path):
    out = tmp_path / "out"
    status, _ = run("convert", out, "--merge", JSON, SHOUT, "--weights", "1", "-0.5", "--method", "cat")
    assert status == 0
    assert json.loads((out / "adapter_config.json").read_text())["rank_pattern"]


def test_quantize_writes_a_base_that_inspect_knows(run, tmp_path):
    out = tmp_path / "out"
    status, said = run("quantize", DEMO / "model", "--out", out, "--quantization", "fp8")
    assert status == 0
    assert f"checkpoint in fp8 written to {out}: 28 linears quantized from" in said
    status, said = run("inspect", out, "--json")
    assert status == 0
    assert json.loads(said)["linears"].keys() == {"fp8"}
    status, said = run("quantize", DEMO / "model", "--out", tmp_path / "again", "--json")
    assert status == 0
    assert json.loads(said)["num_files"] == 1


def test_mistakes_are_one_line(run, tmp_path):
    for arguments, message in {
        ("convert", JSON): "give SRC and DST",
        ("convert", JSON, tmp_path / "x", "--density", "0.5"): "require --merge",
        ("convert", tmp_path / "x", "--merge", JSON, "--weights", "1"): "give at least two adapters",
        ("compare", "--model", DEMO / "model", "--adapters", JSON): "is not NAME=PATH",
        ("compare", "--model", DEMO / "model", "--adapters", f"base={JSON}"): "base model's own",
        (
            "compare",
            "--model",
            DEMO / "model",
            "--adapters",
            f"a={JSON}",
            "--baseline",
            "b",
        ): "must be one of base, a",
        ("merge", DEMO / "model", tmp_path, tmp_path / "x"): "has no adapter_config.json",
        ("quantize", tmp_path / "nowhere"): "is not a folder",
        ("quantize", DEMO / "model", "--out", DEMO / "model"): "already exists",
        ("inspect", tmp_path / "nowhere"): "no folder",
        ("inspect", JSON, "--gpu", "l4-24"): "--gpu is for bases",
        ("inspect", DEMO / "model", "--model", DEMO / "model"): "--model is for adapters",
        ("inspect", DEMO / "model", "--gpu", "l4-24", "--gpu-memory-gib", "24"): "Leave one of them out",
    }.items():
        status, said = run(*arguments)
        assert status == 1
        assert said.startswith("lorafleet: ")
        assert message in said
        assert said.count("\n") == 1


def test_the_bundled_prompts_compare_the_demo(tmp_path):
    """Through the real entry, as README says."""
    prompts = tmp_path / "few.jsonl"
    prompts.write_text(
        '{"messages": [{"role": "user", "content": "What colour is a lime?"}], "answer": "A lime is green."}\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", "from lorafleet.cluster.cli.cli import main; main()", "compare", "--model", "demo/model",
         "--adapters", "shout=demo/adapters/shout", "json=demo/adapters/json", "--retention", str(prompts),
         "--prompts", str(prompts), "--out", str(tmp_path / "report.html"), "--json"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    models = json.loads(done.stdout)["models"]
    assert models["base"]["identical_answers"] == 1
    assert models["shout"]["identical_answers"] == 0
    assert models["base"]["retention_perplexity"] < 1.1 < models["shout"]["retention_perplexity"]
    assert "A LIME IS GREEN." in (tmp_path / "report.html").read_text()

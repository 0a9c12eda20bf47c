from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import run_gpu
from run_gpu import RUNS, Run, run_all

GOOD = "import sys; open(sys.argv[-1], 'w').write('figures'); print('a row')"
BAD = "print('what went wrong'); raise SystemExit(3)"


def test_a_benchmark_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bad.json").write_text("figures of an earlier run")
    runs = [
        Run("bad", "bad.py", 60),
        Run("hangs", "hangs.py", 0.5),
        Run("too_large", "good.py", 60, num_gpus=2),
        Run("good", "good.py", 60),
    ]
    assert run_all(runs, tmp_path / "out", 1, 1000, scripts=tmp_path) == ["bad", "hangs"]
    assert (tmp_path / "out" / "good.json").read_text() == "figures"
    assert (tmp_path / "out" / "good.log").read_text() == "a row\n"
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.json")) == ["good"]
    printed = capsys.readouterr().out
    assert "  what went wrong\nbad: FAILED: exit status 3" in printed
    assert "hangs: FAILED: not complete after 0 s" in printed
    assert "too_large: left out, it needs 2 GPUs" in printed


def test_none_is_started_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([Run("good", "good.py", 60)], tmp_path, 1, 0.0, scripts=tmp_path) == []
    assert "good: left out, 0 s are over" in capsys.readouterr().out


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_command_names_a_script_and_options_that_it_has(run: Run) -> None:
    script, *words = shlex.split(run.command)
    text = (run_gpu.HERE / script).read_text()
    options = {word for word in words if word.startswith("--")} | ({"--json"} if run.writes_json else set())
    if script == "saturation.py":
        options.discard("--kv-cache-dtype")  # It is declared in engine_setup.py.
    assert {option for option in options if f'"{option}"' not in text} == set()


def test_names_are_those_of_files() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)

"""The process that compiles modules, with a shell script in place of ninja."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from lorafleet.workers.attention.module_build import Built, ModuleBuild, ModuleSource

PATIENCE_S = 60.0
T = TypeVar("T")


@pytest.fixture
def ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that replaces ninja by a script of sh."""

    def write(script: str) -> None:
        file = tmp_path / "bin" / "ninja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return write


def sources(folder: Path, *names: str) -> list[ModuleSource]:
    return [ModuleSource(name, str(folder / name), f"{name}.ninja", str(folder / f"{name}.lock")) for name in names]


def until(find: Callable[[], T | None]) -> T:
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := find()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def has_ended(pid: int) -> bool | None:
    """Returns True, or None while the process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return True if state == "Z" else None


def pid_in(file: Path) -> Callable[[], int | None]:
    return lambda: int(text) if file.exists() and (text := file.read_text().strip()) else None


def test_modules_are_compiled_in_order_at_the_lowest_priority(tmp_path: Path, ninja: Callable[[str], None]) -> None:
    ninja(f'echo "$@" >> {tmp_path}/calls; nice >> {tmp_path}/nice')
    build = ModuleBuild(sources(tmp_path, "decode", "prefill"))
    assert until(build.poll) == Built("")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split(" -j ")[0] for call in calls] == [
        f"-C {tmp_path}/{name} -f {name}.ninja" for name in ("decode", "prefill")
    ]
    assert (tmp_path / "nice").read_text().split() == ["19", "19"]
    build.close()


def test_a_failure_names_the_module_and_repeats_the_end_of_the_output(
    tmp_path: Path, ninja: Callable[[str], None]
) -> None:
    ninja("head -c 9000 /dev/zero | tr '\\0' x; echo 'nvcc: no such file'; exit 3")
    built = until(ModuleBuild(sources(tmp_path, "decode", "prefill")).poll)
    assert built.error.startswith("decode: x")
    assert built.error.endswith("nvcc: no such file")
    assert len(built.error) < 2100


def test_a_process_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    build = ModuleBuild(sources(tmp_path, "decode"), command=[sys.executable, "-c", "raise SystemExit(4)"])
    assert until(build.poll) == Built("exit status 4")


def test_a_build_over_its_limit_ends_with_its_compilers(tmp_path: Path, ninja: Callable[[str], None]) -> None:
    ninja(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    build = ModuleBuild(sources(tmp_path, "decode"), limit_s=600.0)
    pid = until(pid_in(tmp_path / "pid"))
    assert build.poll() is None
    build._limit_s = 0.0
    assert build.poll() == Built("it took longer than 0 s")
    assert until(lambda: has_ended(pid))


def test_the_compilers_end_with_the_engine_however_it_ends(tmp_path: Path, ninja: Callable[[str], None]) -> None:
    ninja(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    engine = f"""
        import time
        from lorafleet.workers.attention.module_build import ModuleBuild, ModuleSource
        build = ModuleBuild([ModuleSource("m", {str(tmp_path)!r}, "m.ninja", {str(tmp_path / "m.lock")!r})])
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(engine)])
    try:
        pid = until(pid_in(tmp_path / "pid"))
        process.send_signal(signal.SIGKILL)
        assert until(lambda: has_ended(pid))
    finally:
        process.kill()
        process.wait()

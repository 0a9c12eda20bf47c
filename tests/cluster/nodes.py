"""Starts three_nodes.py for a test, and gives it orders."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from living import family, kill
from tests.cluster.harness import START_S, descendants_named, free_port
from tests.cluster.rays_turn import rays_turn


@dataclass(frozen=True, slots=True)
class Nodes:
    url: str
    process: subprocess.Popen[str]
    folder: Path  # the resolver's
    run_dir: Path

    def kill_busiest(self, name: str) -> None:
        """The one that has computed most."""
        found = [psutil.Process(pid) for pid in descendants_named(self.process.pid, name)]
        max(found, key=lambda one: sum(one.cpu_times()[:2])).kill()

    def order(self, line: str) -> Any:
        """See three_nodes.py."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def running_nodes(arguments: Mapping[str, Any], folder: Path, head_cpus: int = 6) -> Iterator[Nodes]:
    """arguments: of the application, whose resolver finds adapters in the folder."""
    run_dir, port = tempfile.mkdtemp(prefix="lf-", dir="/tmp"), free_port()
    program = Path(__file__).with_name("three_nodes.py")
    turn = contextlib.ExitStack()
    turn.enter_context(rays_turn())
    process = subprocess.Popen(
        [sys.executable, program, run_dir, str(port), json.dumps(arguments), str(head_cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        deadline_s = time.monotonic() + START_S
        for word in ("started\n", "ready\n"):
            while process.stdout.readline() != word:
                assert process.poll() is None and time.monotonic() < deadline_s
            turn.close()
        yield Nodes(f"http://127.0.0.1:{port}", process, folder, Path(run_dir))
        process.stdin.close()
        process.wait(60)
    finally:
        turn.close()
        kill(family(process.pid) if process.poll() is None else [])
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        shutil.rmtree(run_dir, ignore_errors=True)

"""Compiles modules of kernels in a process beside the engine: module_build_program.py, at the lowest priority."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lorafleet.sandbox.process import command_of

PROGRAM = "lorafleet.workers.attention.module_build_program"
BUILD_S = 1800.0  # Longest time of all modules together, with the wait for other engines that compile the same.
MAX_JOBS = 8  # Compilers at the same time. Each may take some GiB of memory.
END_S = 10.0  # Longest time that the process may take to end its compilers.
ERROR_BYTES = 2000  # The end of the compiler's output that an error repeats.


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module that ninja can build."""

    name: str
    folder: str  # The folder in which ninja runs.
    ninja_file: str
    lock_file: str  # Held by the process that compiles the module, among all on this machine.


class ModuleBuild:
    """A process that compiles modules. It ends by itself if the engine's process ends in any way.

    Args:
        command: The command of the process. None means the program of this project.
    """

    def __init__(
        self, modules: Sequence[ModuleSource], limit_s: float = BUILD_S, command: Sequence[str] | None = None
    ) -> None:
        assert modules
        self.num_modules = len(modules)
        self._began_s = time.monotonic()
        self._limit_s = limit_s
        jobs = max(1, min(MAX_JOBS, len(os.sched_getaffinity(0)) // 2))
        settings = {"modules": [asdict(module) for module in modules], "jobs": jobs, "error_bytes": ERROR_BYTES}
        self._process = subprocess.Popen(
            command_of(PROGRAM) if command is None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # poll() finds that the process has ended
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()  # It stays open: its end tells the process to end.

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def poll(self) -> Built | None:
        """Returns the result, or None while the process compiles. Does not wait, unless the process is over its
        limit."""
        if self._process.poll() is None:
            if self.elapsed_s < self._limit_s:
                return None
            self.close()
            return Built(f"it took longer than {self._limit_s:g} s")
        error = self._output()
        return Built(error or (f"exit status {self._process.returncode}" if self._process.returncode else ""))

    def close(self) -> None:
        """Ends the process and its compilers, and waits until they have ended. Does nothing if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _output(self) -> str:
        """Returns what an ended process has written, at most a few kB."""
        stdout = self._process.stdout
        if stdout is None or stdout.closed:
            return ""
        text = stdout.read(2 * ERROR_BYTES).decode(errors="replace").strip()
        self.close()
        return text


@dataclass(frozen=True, slots=True)
class Built:
    """The end of a ModuleBuild."""

    error: str  # Why the modules are not compiled; "" if they are.

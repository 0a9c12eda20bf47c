"""The server's side of one sandboxed process: starts it, sends it jobs, and ends it when it exceeds a limit.

The process runs a program of this project with an empty environment and one socket. The program confines itself
(confinement.py) before it reads untrusted data. The callers decide which process does which job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import lorafleet
from lorafleet.protocol.framing import FrameTooLarge, receive, send
from lorafleet.sandbox.program import SETTINGS

# -I excludes the server's folder, environment and user site. This adds the folder of lorafleet, and at the end those of
# the packages that the server finds there.
_RUN = """
import runpy, sys
program, own, *others = sys.argv[1:]
sys.path[:] = own, *sys.path, *others
runpy.run_module(program, run_name="__main__")
"""
_END_S = 1.0  # Longest time that a process may take to exit once its socket is closed.


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    cpu_s: float  # Processor time of one job.
    wall_s: float  # Elapsed time of one job; longer than cpu_s, for machines whose processors are busy.
    memory_bytes: int  # Memory beyond what the program uses before its first job.
    answer_bytes: int  # Size of the largest answer that is read.


class SandboxEnded(Exception):
    """An error that means that the process has ended. The message gives the reason, in words for the client."""


def command_of(program: str) -> list[str]:
    """Returns the command that runs a module in an isolated interpreter, which finds the packages that this process
    finds, such as those in PYTHONPATH."""
    others = [folder for folder in sys.path if os.path.isabs(folder) and folder != os.getcwd()]
    return [sys.executable, "-I", "-c", _RUN, program, str(Path(lorafleet.__file__).parents[1]), *others]


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A sandboxed process, and the socket whose other end is its standard input."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def stop(self, patience_s: float = 0.0) -> None:
        """Shuts down the socket, and kills the process if it has not exited after patience_s. Leaves no zombie."""
        with contextlib.suppress(OSError):  # the process may have closed its end
            self.socket.shutdown(socket.SHUT_RDWR)
        self.wait(patience_s)
        self.process.kill()
        self.process.wait()

    def wait(self, most_s: float) -> int | None:
        """Waits for the process. Returns its exit status, or None if it still runs after most_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(most_s)
        return self.process.returncode


def start_program(
    command: Sequence[str],
    settings: Mapping[str, object],
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> RunningProgram:
    """Starts the program in a process.

    The process gets nothing of this process's environment, which may hold keys.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
            env={
                SETTINGS: json.dumps(settings),
                "LC_ALL": "C.UTF-8",
                "TOKENIZERS_PARALLELISM": "false",
                **environment,
            },
            cwd="/",
        )
    return RunningProgram(process, ours)


@dataclass(slots=True)
class SandboxProcess:
    """One process that does one job after another. Threads must not share it. Only end() may be called from another
    thread; the job that it interrupts fails."""

    command: Sequence[str]
    limits: SandboxLimits
    settings: Mapping[str, object] = field(default_factory=dict)  # Settings of the program besides its limits.
    pass_fds: Sequence[int] = ()
    num_jobs: int = field(default=0, init=False)
    has_ended: bool = field(default=False, init=False)  # The caller must start another one.
    _program: RunningProgram = field(init=False)

    def __post_init__(self) -> None:
        limits = {"cpu_s": self.limits.cpu_s, "memory_bytes": self.limits.memory_bytes}
        self._program = start_program(self.command, {**limits, **self.settings}, self.pass_fds)

    def ask(self, message: bytes) -> bytearray:
        """Sends one job and waits for its answer. If anything is raised, which is SandboxEnded as a rule, the process
        has been ended."""
        self.num_jobs += 1
        try:
            return self._answer(message)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kills the process and leaves no zombie."""
        self.has_ended = True
        self._program.stop()
        self._program.socket.close()

    def _answer(self, message: bytes) -> bytearray:
        sock, deadline_s = self._program.socket, time.monotonic() + self.limits.wall_s
        try:
            sock.settimeout(self.limits.wall_s)
            send(sock, message)
            answer = receive(sock, self.limits.answer_bytes, deadline_s)
        except TimeoutError:
            raise SandboxEnded(f"it took longer than {self.limits.wall_s:g} s") from None
        except FrameTooLarge:
            raise SandboxEnded(f"it returned more than {self.limits.answer_bytes} bytes") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._how_it_ended()
        return answer

    def _how_it_ended(self) -> SandboxEnded:
        status = self._program.wait(_END_S)
        if status == -signal.SIGPROF:
            return SandboxEnded(f"it took more than {self.limits.cpu_s:g} s of processor time")
        if status == -signal.SIGABRT:  # how Rust ends when it gets no memory
            return SandboxEnded(f"it needs more than {self.limits.memory_bytes >> 20} MiB of memory")
        return SandboxEnded("it crashed the process that read it")

"""The server's side of one sandboxed process: starts it, sends it jobs, and ends it when it exceeds a limit.

The process runs a program of this project with an empty environment and one socket. The program confines itself
(confinement.py) before it reads untrusted data. The callers decide which process does which job.
"""

from __future__ import annotations

import contextlib
import json
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
from lorafleet.sandbox.framing import LENGTH
from lorafleet.sandbox.program import SETTINGS

# -I excludes the server's folder, environment and user site; this adds the folder of lorafleet again.
_RUN = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"
_END_S = 1.0  # Longest time that a process may take to exit once its socket is closed.


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    cpu_s: float  # Processor time of one job.
    wall_s: float  # Elapsed time of one job; longer than cpu_s, for machines whose processors are busy.
    memory_bytes: int  # Memory beyond what the program uses before its first job.
    answer_bytes: int  # Size of the largest answer that is read.


class SandboxEnded(Exception):
    """An error that means that the process has ended or must be ended. The message gives the reason, in words for the
    client."""


def command_of(program: str) -> list[str]:
    """Returns the command that runs a module of lorafleet in an isolated interpreter."""
    return [sys.executable, "-I", "-c", _RUN, str(Path(lorafleet.__file__).parents[1]), program]


def start_program(
    command: Sequence[str],
    settings: Mapping[str, object],
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the program in a process. Returns it with the socket whose other end is its standard input.

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
    return process, ours


@dataclass(slots=True)
class SandboxProcess:
    """One process and its socket. Threads must not share it."""

    command: Sequence[str]
    limits: SandboxLimits
    settings: Mapping[str, object] = field(default_factory=dict)  # Settings of the program besides its limits.
    pass_fds: Sequence[int] = ()
    num_jobs: int = field(default=0, init=False)
    _socket: socket.socket = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        settings = {"cpu_s": self.limits.cpu_s, "memory_bytes": self.limits.memory_bytes, **self.settings}
        self._process, self._socket = start_program(self.command, settings, self.pass_fds)

    def ask(self, message: bytes) -> bytearray:
        """Sends one job and waits for its answer. Raises SandboxEnded; the caller must then call end()."""
        self.num_jobs += 1
        deadline_s = time.monotonic() + self.limits.wall_s
        try:
            self._socket.settimeout(self.limits.wall_s)
            self._socket.sendall(LENGTH.pack(len(message)))
            self._socket.sendall(message)
            (size,) = LENGTH.unpack(self._receive(LENGTH.size, deadline_s))
            if size > self.limits.answer_bytes:
                raise SandboxEnded(f"it returned more than {self.limits.answer_bytes} bytes")
            return self._receive(size, deadline_s)
        except TimeoutError:
            raise SandboxEnded(f"it took longer than {self.limits.wall_s:g} s") from None
        except OSError:
            raise self._how_it_ended() from None

    def end(self) -> None:
        """Kills the process and leaves no zombie."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, size: int, deadline_s: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise self._how_it_ended()
            data += part
        return data

    def _how_it_ended(self) -> SandboxEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.returncode == -signal.SIGPROF:
            return SandboxEnded(f"it took more than {self.limits.cpu_s:g} s of processor time")
        if self._process.returncode == -signal.SIGABRT:  # how Rust ends when it gets no memory
            return SandboxEnded(f"it needs more than {self.limits.memory_bytes >> 20} MiB of memory")
        return SandboxEnded("it crashed the process that read it")

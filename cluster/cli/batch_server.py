"""Runs `lorafleet serve` for one batch, as a process of its own that ends with this one."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from lorafleet.protocol.errors import LorafleetError

PROGRAM = "from lorafleet.cluster.cli.cli import main; main()"
READY = "ready: "
STOP_S = 60.0
_PR_SET_PDEATHSIG = 1


class BatchServer:
    """A server on a free port of this machine. `options` are those of `lorafleet serve`, by their names in AppArgs.

    Unless LORAFLEET_STATE_DIR is set, its catalogue is a temporary folder, since a lasting one may be another server's.
    Entering it waits until the server is ready. Raises LorafleetError if it ends before.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-c", PROGRAM, "serve", "--port", str(port), *flags(options)]

        self._state = tempfile.TemporaryDirectory(prefix="lf-batch-")
        self._reader: threading.Thread | None = None  # Copies the server's messages to stderr.

    def __enter__(self) -> BatchServer:
        libc = ctypes.CDLL(None)  # Loaded here, since little is safe between fork and exec.
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={"LORAFLEET_STATE_DIR": self._state.name} | os.environ,
            process_group=0,  # Ctrl-C stops this process, which then stops the server.
            # If this process is killed, the server gets SIGTERM and leaves nothing behind.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        assert self._process.stdout is not None
        try:
            if not _show(self._process.stdout, until=READY):
                raise LorafleetError(f"the server has ended with status {self._process.wait()}; its messages say why.")
        except BaseException:
            self._stop()
            raise
        self._reader = threading.Thread(target=_show, args=(self._process.stdout, None), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def check(self) -> None:
        """Raises LorafleetError if the server has ended."""
        status = self._process.poll()
        if status is not None:
            raise LorafleetError(
                f"the server has ended with status {status}. Run the same command again to go on; what was answered is "
                "not asked again."
            )

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._state.cleanup()


def flags(options: dict[str, Any]) -> list[str]:
    """Returns the options as arguments of a command line."""
    found: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for entry in value if isinstance(value, list) else [value]:
                found += [f"--{flag}", str(entry)]
    return found


def _show(lines: IO[str], until: str | None) -> bool:
    """Copies lines to stderr, up to the first that begins with `until`. Returns whether there was one."""
    for line in lines:
        sys.stderr.write(line)
        if until is not None and line.startswith(until):
            return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Compiles modules by ninja, one after another, in a process that does nothing else. module_build.py starts it.

It reads one line of settings from standard input, and ends with its compilers when standard input ends. So it never
outlives the engine. If a module cannot be compiled, it writes the end of ninja's output and its exit status is 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading

from filelock import FileLock

_NICE = 19  # the lowest priority
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class _Ninja:
    """The running ninja, which another thread may end. ninja ends its compilers when it gets SIGTERM."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self, folder: str, ninja_file: str, jobs: int, error_bytes: int) -> str:
        """Returns "" if the module is built, else the end of the output."""
        command = ["ninja", "-C", folder, "-f", ninja_file, "-j", str(jobs)]
        with self._lock:
            if self._ended:
                return "ended"
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
        output, _ = self._process.communicate()
        if self._process.returncode == 0:
            return ""
        return output[-error_bytes:].decode(errors="replace") or f"ninja: exit status {self._process.returncode}"

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait()


def _end_with_parent() -> None:
    """Makes the kernel end ninja with this process, even if this process is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    settings = json.loads(sys.stdin.buffer.readline())
    os.nice(_NICE)
    ninja = _Ninja()

    def end_with_the_engine() -> None:
        sys.stdin.buffer.read()
        ninja.end()
        os._exit(2)

    threading.Thread(target=end_with_the_engine, daemon=True).start()
    for module in settings["modules"]:
        with FileLock(module["lock_file"]):  # FlashInfer's own lock: another engine may compile the same module
            os.makedirs(module["folder"], exist_ok=True)
            error = ninja.run(module["folder"], module["ninja_file"], settings["jobs"], settings["error_bytes"])
        if error:
            print(f"{module['name']}: {error}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a daemon thread still reads standard input

"""Runs `lorafleet serve` in a process of its own, and reads its CPU time and the engine's counters."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

START_S = 300.0  # Kernels may have to be compiled first.
STOP_S = 30.0
PROBE_S = 2.0
ROLES = ("EngineReplica", "WorkerActor", "AdapterRouter", "haproxy", "DirectoryActor", "ProxyActor")


class LocalServer(NamedTuple):
    url: str
    pid: int

    def cpu_s(self) -> Counter[str]:
        return cpu_s(self.pid, ROLES)

    def engine_counters(self) -> dict[str, float]:
        """Returns the engine's series of /metrics without their prefixes, summed over replicas and tiers."""
        sums: Counter[str] = Counter()
        for line in self._metrics():
            if line.startswith(ENGINE_PREFIXES):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0].removeprefix(ENGINE_PREFIXES[0]).removeprefix(ENGINE_PREFIXES[1])
                sums[name] += float(value)
        return dict(sums)

    def generated_tokens(self) -> Counter[str]:
        """Returns the number of tokens that each replica has generated."""
        tokens: Counter[str] = Counter()
        for line in self._metrics():
            if found := GENERATED.match(line):
                tokens[found["replica"]] += round(float(found["value"]))
        return tokens

    def replica_url(self) -> str:
        """Returns the URL of one replica's own HTTP server, which HAProxy sends its requests to."""
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if REPLICA_TITLE not in " ".join(process.cmdline()):
                    continue
                for connection in process.net_connections("tcp4"):
                    url = f"http://127.0.0.1:{connection.laddr.port}"
                    if connection.status == psutil.CONN_LISTEN and _serves_models(url):
                        return url
        sys.exit(f"no replica of the server {self.pid} answers HTTP at a port of its own")

    def _metrics(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return lines

    def settle(self) -> None:
        """Waits until no engine compiles a faster attention beside its steps."""
        deadline = time.monotonic() + START_S
        while self.engine_counters().get("attention_waits") and time.monotonic() < deadline:
            time.sleep(1.0)


REPLICA_TITLE = "ray::ServeReplica:lorafleet:EngineReplica"
GENERATED = re.compile(r'lorafleet_engine_generation_tokens_total\{.*?replica="(?P<replica>[^"]*)".*\} (?P<value>\S+)')
ENGINE_PREFIXES = ("lorafleet_engine_", "vllm:")


def _serves_models(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=PROBE_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # Another protocol may be spoken there.
        return False


def cpu_s(pid: int, roles: Sequence[str]) -> Counter[str]:
    """Returns user and system time of the process and its descendants, by the role in their titles."""
    total: Counter[str] = Counter()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times, title = process.cpu_times(), (process.cmdline() or [process.name()])[0]
            total[next((role for role in roles if role in title), "other")] += times.user + times.system
    return total


@contextlib.contextmanager
def running(arguments: Sequence[str], log_file: Path) -> Iterator[LocalServer]:
    """Yields the server when it is ready, and writes its output to log_file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from lorafleet.cluster.cli.cli import main; main()", "serve", *arguments]
    with log_file.open("wb") as log:
        # The server gets its own process group, so that Ctrl-C reaches it once, from here. It does not get its own
        # session: Linux first divides processor time among sessions, so the figures would depend on the client's share.
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, process_group=0)
    try:
        _wait_until_ready(process, log_file)
        yield LocalServer(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_S
    while "\nready: " not in log_file.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start:\n{log_file.read_text()}")
        time.sleep(0.1)

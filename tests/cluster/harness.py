"""Starts the real server for tests: `lorafleet serve` as a process of its own, stopped and checked at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from file_server import FileServer
from living import command, family, is_alive, kill
from tests.cluster.last_streams import streaming_to_the_end
from tests.cluster.rays_turn import rays_turn

LAST_S = 5.0  # what was told to end when the server ended may take a while to
START_S = 300.0  # Ray, torch and transformers are imported by several processes on few cores; FlashInfer may compile
STOP_S = 60.0
ADMIN_KEY = "the admin key"


class ServerFailed(AssertionError):
    """The server ended, or was not ready in time; the message has what it printed."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pid: int

    def processes(self, name: str) -> list[int]:
        """Process ids of its descendants, see descendants_named."""
        return descendants_named(self.pid, name)


@dataclass(frozen=True, slots=True)
class SharedServer:
    """See conftest.py."""

    running: RunningServer
    http: httpx.Client  # with the admin key
    state_dir: Path
    resolver_dir: Path
    web: FileServer


@contextlib.contextmanager
def running_server(arguments: Sequence[str], log_file: Path, stop_signal: int = signal.SIGINT) -> Iterator[str]:
    """As serving() does; yields the URL."""
    with serving(arguments, log_file, stop_signal) as server:
        yield server.url


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], log_file: Path, stop_signal: int = signal.SIGINT, last_streams: str | None = None
) -> Iterator[RunningServer]:
    """`lorafleet serve` with these arguments on a free port.

    Afterwards: exit status 0, and none of its processes left. log_file gets what it printed. last_streams: a model that
    answers streams when the server is told to end, of which none may be cut.
    """
    port = free_port()
    streams: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    with rays_turn():
        process = start_server([*arguments, "--port", str(port)], log_file)
        wait_until_printed("\nstarting ", process, log_file)  # its replicas: Ray is there
    try:
        wait_until_ready(process, log_file)
        yield RunningServer(f"http://127.0.0.1:{port}", process.pid)
        if last_streams is not None:
            streams = streaming_to_the_end(f"http://127.0.0.1:{port}", last_streams)
    finally:
        with streams:
            status, left = stop_server(process, stop_signal)
    assert left == [], f"processes left: {left}"
    assert status == 0, log_file.read_text()


async def greedy_answers(
    url: str,
    jobs: Sequence[tuple[list[int], str | None]],
    base: str = "tiny",
    verify: ssl.SSLContext | bool = True,
    num_tokens: int = 10,
) -> list[Any]:
    """Greedy tokens for each (prompt, adapter), all asked for at once, with logprobs and token ids."""
    http = DefaultAsyncHttpxClient(verify=verify)
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, http_client=http
    ) as client:

        async def ask(ids: list[int], kind: str | None) -> Any:
            return await client.completions.create(
                model=kind or base,
                prompt=ids,
                max_tokens=num_tokens,
                temperature=0,
                logprobs=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )

        return await asyncio.gather(*(ask(*job) for job in jobs))


def start_server(arguments: Sequence[str], log_file: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that a signal to the test does not reach it; its catalogue is beside the log.

    Not in a session of its own: Linux first divides processor time among sessions, and the test would wait for it.
    """
    program = "from lorafleet.cluster.cli.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--cpu-threads", "1", *arguments]
    environment = os.environ | {"LORAFLEET_STATE_DIR": str(log_file.parent / "state")}
    with log_file.open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, process_group=0, cwd="/", env=environment, umask=0
        )


def wait_until_ready(process: subprocess.Popen[bytes], log_file: Path) -> None:
    wait_until_printed("\nready: ", process, log_file)


def wait_until_printed(words: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_S
    while words not in log_file.read_text():
        if process.poll() is not None:
            raise ServerFailed(f"exit status {process.returncode}:\n{log_file.read_text()}")
        if time.monotonic() > deadline:
            stop_server(process, signal.SIGTERM)
            raise ServerFailed(f"has not printed {words.strip()!r} after {START_S:.0f} s:\n{log_file.read_text()}")
        time.sleep(0.1)


def stop_server(process: subprocess.Popen[bytes], stop_signal: int) -> tuple[int, list[str]]:
    """Exit status, and the command lines of the descendants that outlived it for long (which are then killed)."""
    ours = family(process.pid)
    process.send_signal(stop_signal)
    try:
        status = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    deadline_s = time.monotonic() + LAST_S
    while (left := [one for one in ours if is_alive(one)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    names = [" ".join(command(one))[:100] for one in left]
    kill(left)
    return status, names


_given_ports: set[int] = set()


def free_port() -> int:
    """Returns a free port for a server that starts later. The system gives such ports only to those who name them, so
    nobody else gets this one by chance meanwhile. Each of pytest's processes has ports of its own and gets none twice,
    since a server may take a minute to start."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = [port for port in range(30_000 + worker, 32_768, num_workers) if port not in _given_ports]
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given_ports.add(port)
            return port
    raise AssertionError("no port is free")


def descendants_named(pid: int, name: str) -> list[int]:
    """Process ids below pid whose title or command line contains the name: "WorkerActor", "haproxy"."""
    return [one.pid for one in family(pid) if any(name in part for part in command(one))]

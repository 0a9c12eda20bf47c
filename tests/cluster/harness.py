"""Starts the real server for tests: `lorafleet serve` as a process of its own, stopped and checked at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from openai import AsyncOpenAI

START_S = 300.0  # Ray, torch and transformers are imported by several processes on few cores; FlashInfer may compile
STOP_S = 30.0


class ServerFailed(AssertionError):
    """The server ended, or was not ready in time; the message has what it printed."""


@contextlib.contextmanager
def running_server(arguments: Sequence[str], log_file: Path, stop_signal: int = signal.SIGINT) -> Iterator[str]:
    """`lorafleet serve` with these arguments on a free port; yields its URL.

    Afterwards: exit status 0, and none of its processes left. log_file gets what it printed.
    """
    port = free_port()
    process = start_server([*arguments, "--port", str(port)], log_file)
    try:
        wait_until_ready(process, log_file)
        yield f"http://127.0.0.1:{port}"
    finally:
        status, left = stop_server(process, stop_signal)
    assert left == [], f"processes left: {left}"
    assert status == 0, log_file.read_text()


async def greedy_answers(url: str, jobs: Sequence[tuple[list[int], str | None]]) -> list[Any]:
    """Ten greedy tokens for each (prompt, adapter), all asked for at once, with logprobs and token ids."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def ask(ids: list[int], kind: str | None) -> Any:
            return await client.completions.create(
                model=kind or "tiny",
                prompt=ids,
                max_tokens=10,
                temperature=0,
                logprobs=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )

        return await asyncio.gather(*(ask(*job) for job in jobs))


def start_server(arguments: Sequence[str], log_file: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a signal to the test does not reach it; its catalogue is beside the log."""
    command = [sys.executable, "-c", "from lorafleet.cluster.cli import main; main()", "serve", *arguments]
    environment = os.environ | {"LORAFLEET_STATE_DIR": str(log_file.parent / "state")}
    with log_file.open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd="/", env=environment
        )


def wait_until_ready(process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_S
    while "\nready: " not in log_file.read_text():
        if process.poll() is not None:
            raise ServerFailed(f"exit status {process.returncode}:\n{log_file.read_text()}")
        if time.monotonic() > deadline:
            stop_server(process, signal.SIGTERM)
            raise ServerFailed(f"not ready after {START_S:.0f} s:\n{log_file.read_text()}")
        time.sleep(0.1)


def stop_server(process: subprocess.Popen[bytes], stop_signal: int) -> tuple[int, list[str]]:
    """Exit status, and the command lines of the descendants that outlived it (which are then killed)."""
    family = _family(process.pid)
    process.send_signal(stop_signal)
    try:
        status = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    left = [one for one in family if _is_alive(one)]
    names = [" ".join(_command(one))[:100] for one in left]
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return status, names


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants_named(pid: int, name: str) -> list[int]:
    """Process ids below pid whose title or command line contains the name: "WorkerActor", "haproxy"."""
    return [one.pid for one in _family(pid) if any(name in part for part in _command(one))]


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

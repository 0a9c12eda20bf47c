"""Runs Prometheus, and Grafana if it is installed, for a running server until Ctrl-C (`lorafleet metrics up`).

Both listen on the loopback interface only. Their files and data are in one folder, which remains afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from lorafleet.cluster.monitoring import grafana, scrape_config
from lorafleet.cluster.monitoring.scrape_config import ScrapeTarget
from lorafleet.cluster.monitoring.shipped_files import write_rules
from lorafleet.protocol.errors import ConfigError
from lorafleet.resolvers.private_files import keep_private, make_folder

READY_S = 60.0
STOP_S = 15.0
POLL_S = 0.2
SERVER_S = 10.0  # A scrape may take this long.

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `lorafleet metrics up`."""

    target: ScrapeTarget
    folder: Path  # Configuration and data of both programs.
    port: int
    grafana_port: int
    grafana_home: Path | None
    retention: str  # In Prometheus' own spelling, such as 15d.


class MonitoringStopped(BaseException):
    """Raised when SIGINT or SIGTERM arrives."""


def run(options: Options) -> None:
    """Runs both programs until SIGINT or SIGTERM. Raises ConfigError before it starts anything, or when Prometheus
    ends."""
    program = shutil.which("prometheus")
    if program is None:
        raise ConfigError(
            "Prometheus is not installed: there is no `prometheus` on PATH. Install it (Debian, Ubuntu: apt install "
            "prometheus; otherwise https://prometheus.io/download), or run `lorafleet metrics config` to write the "
            "files for a Prometheus that runs elsewhere."
        )
    for port, option in ((options.port, "--port"), (options.grafana_port, "--grafana-port")):
        _check_free(port, option)
    _check_server(options.target)
    keep_private()
    write_files(options)
    with _stopping(), contextlib.suppress(MonitoringStopped), contextlib.ExitStack() as children:
        prometheus = children.enter_context(_child(_prometheus_command(program, options), options.folder, "prometheus"))
        _wait_until_ready(prometheus, options)
        console.print(f"Prometheus: {_url(options.port)} scrapes {options.target.metrics_url}")
        installed = grafana.find_installed(options.grafana_home)
        if installed is None:
            console.print(
                f"Grafana is not installed; its dashboards are in {options.folder / 'grafana' / 'dashboards'}"
            )
        else:
            settings = grafana.settings(options.folder / "grafana", options.grafana_port)
            children.enter_context(_child(installed.command(), options.folder, "grafana", settings))
            console.print(f"Grafana: {_url(options.grafana_port)}, folder lorafleet; the first login is admin/admin")
        console.print("Ctrl-C stops everything")
        status = prometheus.wait()
        raise ConfigError(f"Prometheus ended with status {status}: {_last_line(options.folder / 'prometheus.log')}")


def write_files(options: Options) -> None:
    """Writes prometheus.yml, the rules, and Grafana's folder."""
    make_folder(options.folder)
    (options.folder / "prometheus.yml").write_text(scrape_config.to_yaml(options.target))
    write_rules(options.folder)
    grafana.provision(options.folder / "grafana", _url(options.port))


def _prometheus_command(program: str, options: Options) -> list[str]:
    return [
        program,
        f"--config.file={options.folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={options.folder / 'data'}",
        f"--storage.tsdb.retention.time={options.retention}",
        f"--web.listen-address=127.0.0.1:{options.port}",
    ]


def _check_free(port: int, option: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on 127.0.0.1:{port}: {error.strerror}. Choose another {option}."
            ) from None


def _check_server(target: ScrapeTarget) -> None:
    """Checks that the server shows its metrics to this key. Prometheus would report a failure only on a page of its
    own."""
    headers = {}
    if target.bearer_token_file is not None:
        headers["authorization"] = f"Bearer {target.bearer_token_file.read_text().strip()}"
    context = ssl.create_default_context(cafile=target.ca_file) if target.url.startswith("https") else None
    try:
        request = urllib.request.Request(target.metrics_url, headers=headers)
        with urllib.request.urlopen(request, timeout=SERVER_S, context=context):
            return
    except urllib.error.HTTPError as error:
        remedy = "Check that this is the address of a lorafleet server."
        if error.code in (401, 403):
            remedy = "Give a file with a key of the metrics scope as --bearer-token-file."
        raise ConfigError(f"{target.metrics_url} answers with status {error.code}. {remedy}") from None
    except OSError as error:
        raise ConfigError(
            f"{target.metrics_url} does not answer: {error}. Start the server first, or give its address as --server."
        ) from None


@contextlib.contextmanager
def _child(
    command: Sequence[str], folder: Path, name: str, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program until the block ends, with its output in NAME.log. It has a session of its own, so that Ctrl-C
    reaches it only through this process, once."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | dict(settings or {}), start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], options: Options) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        if process.poll() is not None:
            raise ConfigError(f"Prometheus did not start: {_last_line(options.folder / 'prometheus.log')}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{_url(options.port)}/-/ready", timeout=POLL_S * 10):
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"Prometheus was not ready after {READY_S:.0f} s; see {options.folder}/prometheus.log.")
        time.sleep(POLL_S)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it printed nothing to {log}."


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise MonitoringStopped, once."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _raise_stopped) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _raise_stopped(_number: int, _frame: FrameType | None) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # A second signal must not interrupt the cleanup.
    raise MonitoringStopped

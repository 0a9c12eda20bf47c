"""The stand-in for HAProxy, run over the configuration that Serve's own code writes, as the real HAProxy."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.proxy.haproxy_config import edit
from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES
from tests.cluster.harness import free_port

ANSWER_S = 60.0


def serves_config(
    folder: Path, backends: Sequence[int], port: int, router: int | None = None, fallback: int | None = None
) -> Path:
    """Writes what Serve's HAProxyManager writes. The others are ports too: of replicas, which are called r0, r1 and so
    on, of a router, and of Serve's own proxy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.serve._private import haproxy as serves
        from ray.serve._private.common import RequestProtocol
        from ray.serve.config import HTTPOptions
    config = serves.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        metrics_port=free_port(),
        stats_port=free_port(),
        socket_path=str(folder / "admin.sock"),
        metrics_enabled=False,
        enable_hap_optimization=False,
        has_received_routes=True,
        has_received_servers=True,
        is_head=True,
    )
    one = serves.BackendConfig(
        name="app",
        path_prefix="/",
        app_name="app",
        protocol=RequestProtocol.HTTP,
        servers=[_server(serves, f"r{i}", backend) for i, backend in enumerate(backends)],
        fallback_server=None if fallback is None else _server(serves, "proxy", fallback),
        ingress_request_router_servers=[] if router is None else [_server(serves, "router", router)],
    )
    serves.RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY = True  # of the environment, which is read at the import
    serves.RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE = ROUTED_BODY_BYTES
    path = folder / "haproxy.cfg"
    serves.HAProxyApi(config, {"app": one} if backends else {}, str(path))._generate_config_file_internal()
    return path


def _server(serves: Any, name: str, port: int) -> Any:
    return serves.ServerConfig(name=name, host="127.0.0.1", port=port, replica_id=name)


@contextlib.contextmanager
def running(
    folder: Path,
    backends: Sequence[int],
    environment: dict[str, str],
    router: int | None = None,
    fallback: int | None = None,
    bounds: dict[str, Any] | None = None,
) -> Iterator[tuple[int, int]]:
    """Its process id, which becomes HAProxy's, and its port. bounds: fields of Ingress, in place of its defaults."""
    port = free_port()
    config = serves_config(folder, backends, port, router, fallback)
    if bounds is not None:
        ingress = replace(haproxy.read_ingress(environment, folder), **bounds)
        config.write_text(edit(config.read_text(), ingress))
    process = start(config, environment)
    try:
        deadline = time.monotonic() + ANSWER_S
        while not runs(folder / "admin.sock"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(ANSWER_S)


def start(config: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", haproxy.__name__, "-db", "-f", str(config)]
    return subprocess.Popen(command, env=os.environ | environment)


def runs(admin_socket: Path) -> bool:
    """HAProxy answers there once all that it listens on is bound."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(admin_socket))
            connection.sendall(b"show info\n")
            return bool(connection.recv(64))
        except OSError:
            return False


def wait_until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + ANSWER_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

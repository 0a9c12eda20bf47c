"""Sets the environment in which Ray Serve starts. Serve reads its settings for HAProxy from it when it is imported.

This file imports nothing of Ray, so that the environment can be set before. The other half of direct streaming is
cluster/proxy/ingress.py.
"""

from __future__ import annotations

import os
import random
import secrets
import shlex
import socket
import sys
from pathlib import Path

from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.proxy.tls import TLSFiles
from lorafleet.protocol.errors import ConfigError

PORTS = 100  # In a range: a reserved one, two for HAProxy, one for Serve's proxy, one for each local replica.
START_S = 300  # Seconds that one process of Ray or Serve may take to start.
REGISTER_S = 180  # Seconds that a worker may take; then Ray starts another one, also if the first has ended before.
CONTROLLER_CALLBACK = "lorafleet.cluster.proxy.ingress:watch_haproxy"
PROXY_MIDDLEWARES = "lorafleet.cluster.proxy.proxy_affinity:middlewares"
# Ray's default is 15. All serving processes are Ray workers, so every other program of the machine would delay them.
WORKER_NICENESS = "0"
# Bytes of a request that the router may see; a name after them only costs affinity. HAProxy's buffers have this size,
# and each stream holds one or two of them.
ROUTED_BODY_BYTES = 1 << 18
DIRECT_STREAMING = {  # On one machine and on a cluster alike.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # HAProxy may hold two such buffers for each of 4096 connections, which is 64 GiB with the default of 8 MiB.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(ROUTED_BODY_BYTES),
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # Otherwise Python parses a log line for every request.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": CONTROLLER_CALLBACK,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # A dead manager of HAProxy is noticed after 3 periods.
}


def prepare(run_dir: str, *, direct_streaming: bool) -> None:
    """Sets environment variables of this process, which Ray's processes inherit. Those that the user has set stay.

    `run_dir` must be private, and its path at most 20 characters, since the path of a Unix socket with a node id in
    it must fit into 108 bytes.
    """
    for name, value in _ray().items():
        os.environ.setdefault(name, value)
    if direct_streaming:
        for name, value in _direct_streaming(run_dir).items():
            os.environ.setdefault(name, value)


def open_ingress(run_dir: str, host: str, tls: TLSFiles | None, *, needs_key: bool = False) -> None:
    """Opens the ingress for direct streaming, after prepare(). Only HAProxy listens on this address, with TLS if
    there are files for it, and at ingress_socket(). Serve's own host stays the loopback interface, for the replicas
    and its proxy."""
    if haproxy.RAYS_VARIABLE in os.environ:
        os.environ.setdefault(haproxy.BINARY_VARIABLE, os.environ[haproxy.RAYS_VARIABLE])
    os.environ |= {
        haproxy.RAYS_VARIABLE: _haproxy_stand_in(run_dir),
        haproxy.HOST_VARIABLE: host,
        haproxy.SOCKET_VARIABLE: ingress_socket(run_dir),
    }
    if needs_key:
        os.environ[haproxy.NEEDS_KEY_VARIABLE] = "1"
    if tls is not None:
        os.environ |= tls.environment()


def ingress_socket(run_dir: str) -> str:
    """Returns the path of the socket where this user reaches the ingress, whatever its address and TLS are."""
    return f"{run_dir}/ingress.sock"


def _ray() -> dict[str, str]:
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": CONTROLLER_CALLBACK,
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_MIDDLEWARES,
        # On a busy machine a process may take minutes to start, and Ray's defaults (5 to 60 s) would end it just before
        # it is ready. A proxy of Serve's is killed after three times its limit.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(START_S // 3),
        "RAY_gcs_server_port_wait_time_s": str(START_S),
        "RAY_py_gcs_connect_timeout_s": str(START_S),
        "RAY_gcs_rpc_server_connect_timeout_s": str(START_S),
        "RAY_worker_register_timeout_seconds": str(REGISTER_S),
        "RAY_agent_register_timeout_ms": str(START_S * 1000),
        # Three processes would answer requests for Ray's own metrics without its token, so they are not exported. The
        # last two have no setting for this, but continue if they cannot listen.
        "RAY_enable_metrics_collection": "0",
        "AUTOSCALER_METRIC_PORT": "-1",
        "DASHBOARD_METRIC_PORT": "-1",
        # Ray's processes listen on the loopback interface only, although the name does not say so.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": WORKER_NICENESS,
    }
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        # Anyone who can reach Ray's ports can run code. This run gets its own token, without a file in the home folder.
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return settings


def _direct_streaming(run_dir: str) -> dict[str, str]:
    held = _hold_range()
    metrics_port, stats_port, fallback_port, first_replica = held + 1, held + 2, held + 3, held + 4
    return DIRECT_STREAMING | {
        # By default replicas bind ports from 30000 on, with SO_REUSEPORT. A second Ray on this machine would share
        # them, and each Ray would get some of the other's requests.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(held + PORTS - 1),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{run_dir}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{run_dir}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": run_dir,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{run_dir}/state",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # A stopping replica stays open this long for an HAProxy that does not know its successor yet. On one machine it
        # soon does, unless the machine is very busy.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    }


def _hold_range() -> int:
    """Returns the first of PORTS consecutive ports on which nothing listens, below those that Linux gives to
    clients. It stays bound until this process ends, so that a server that starts meanwhile takes another range."""
    starts = list(range(10_000, 30_000, PORTS))
    random.SystemRandom().shuffle(starts)
    for start in starts:
        first = socket.socket()
        if _binds(first, start) and all(_is_free(start + i) for i in range(1, PORTS)):
            first.detach()
            return start
        first.close()
    raise ConfigError(
        f"HAProxy and the replicas need {PORTS} consecutive free ports, and there are none between 10000 and 30000. "
        "Stop programs that listen there, or use --no-direct-streaming."
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


def _haproxy_stand_in(run_dir: str) -> str:
    """Writes a script that runs cluster/proxy/haproxy.py, and returns its path. This environment may have no
    `lorafleet-haproxy` on its own path."""
    script = Path(run_dir) / haproxy.NAME
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m {haproxy.__name__} "$@"\n')
    script.chmod(0o700)
    return str(script)

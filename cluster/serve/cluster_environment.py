"""Defines the environment that Ray needs on every node of a cluster. With it, Serve streams directly, and a node
outlives Ray's agents. serve_environment.py has what one machine needs in addition. `lorafleet config environment`
prints it for a shell."""

from __future__ import annotations

import sys
from pathlib import Path

from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.serve.serve_environment import (
    CONTROLLER_CALLBACK,
    PROXY_MIDDLEWARES,
    ROUTED_BODY_BYTES,
    WORKER_NICENESS,
)
from lorafleet.protocol.errors import ConfigError

NEEDED = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # HAProxy may hold two such buffers for each of 4096 connections, which is 64 GiB with the default of 8 MiB.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(ROUTED_BODY_BYTES),
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # Otherwise Python parses a log line for every request.
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": CONTROLLER_CALLBACK,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # A dead manager of HAProxy is noticed after 3 periods.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_MIDDLEWARES,
    "RAY_worker_niceness": WORKER_NICENESS,
    "RAY_START_HOOK": "lorafleet.cluster.serve.ray_agents.keep_agents",  # A raylet outlives its agents.
}
TOKEN = {"RAY_AUTH_MODE": "token"}  # Anyone who can reach Ray's ports can run code.


def environment() -> dict[str, str]:
    """Returns the variables for this machine. They include the whole path of lorafleet-haproxy, which closes
    HAProxy's own pages. Raises ConfigError if it is not installed."""
    path = Path(sys.executable).with_name(haproxy.NAME)
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Reinstall lorafleet into this Python environment.")
    return NEEDED | TOKEN | {haproxy.RAYS_VARIABLE: str(path)}

"""Defines the environment that Ray needs on every node of a cluster. With it, Serve streams directly, and a node
outlives Ray's agents. serve_environment.py has what one machine needs in addition. `lorafleet config environment`
prints it for a shell."""

from __future__ import annotations

import sys
from pathlib import Path

from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.serve.serve_environment import (
    DIRECT_STREAMING,
    PROXY_MIDDLEWARES,
    WORKER_NICENESS,
)
from lorafleet.protocol.errors import ConfigError

NEEDED = DIRECT_STREAMING | {
    "RAY_SERVE_LOG_TO_STDERR": "0",
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

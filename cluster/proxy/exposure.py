"""Prevents a start in which anyone who reaches the ingress could use it, or run code through Ray: on an address
beyond the loopback interface without API keys, or without Ray's token authentication. It does not depend on Ray."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.proxy.tls import CERT_VARIABLE
from lorafleet.protocol.errors import ConfigError


def check_exposure(host: str, args: AppArgs, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if `host`, where the ingress listens, is open to the network without API keys or Ray's
    authentication. `environment` is the one in which Ray was started."""
    if _is_loopback(host):
        return
    if args.api_keys is None and not args.insecure_without_keys:
        raise ConfigError(
            f"host={host} is open to the network, and there are no API keys: anyone who can reach it can use every "
            "adapter. Create keys with `lorafleet keys` and set api_keys, or listen on 127.0.0.1. If a proxy in front "
            "authenticates clients, set insecure_without_keys."
        )
    if environment.get("RAY_AUTH_MODE", "").lower() in ("", "disabled") and not args.insecure_without_ray_token:
        raise ConfigError(
            f"host={host} is open to the network, and Ray runs without authentication: anyone who can reach Ray's "
            "ports can run code on every node. Start Ray on every node with RAY_AUTH_MODE=token and the token of `ray "
            "get-auth-token --generate` (docs/security.md). If Ray's ports are closed to others by other means, set "
            "insecure_without_ray_token."
        )


def check_tls(serves_own: bool, direct_streaming: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if TLS is set in a place where it has no effect, so that TLS is never left out silently. On
    a cluster it is set either in http_options (`serves_own` is True then) or in the environment."""
    if serves_own and direct_streaming:
        raise ConfigError(
            "http_options sets ssl_certfile, which HAProxy would not use. Start Ray on every node with "
            f"{CERT_VARIABLE} and the variables that belong to it instead (docs/security.md)."
        )
    stand_in = os.path.basename(environment.get(haproxy.RAYS_VARIABLE, "")) == haproxy.NAME
    if CERT_VARIABLE in environment and not (direct_streaming and stand_in):
        raise ConfigError(
            f"{CERT_VARIABLE} takes effect only with HAProxy. Start Ray on every node with RAY_SERVE_ENABLE_HA_PROXY=1 "
            f"and with {haproxy.RAYS_VARIABLE} set to {haproxy.NAME}, or set ssl_certfile under http_options instead."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The route that answers a request, for metrics and traces: its path with the names of its parameters, so that there
are few different values."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

CLIENT_LEFT = 499  # nginx's status for a client that disconnected before its answer.

_ENDPOINT = "lorafleet.endpoint"  # in the ASGI scope


def set_endpoint(scope: MutableMapping[str, Any], path: str) -> None:
    scope[_ENDPOINT] = path


def endpoint_of(scope: MutableMapping[str, Any]) -> str:
    """Returns the path of the route, or `unknown` if no route matched."""
    return str(scope.get(_ENDPOINT, "unknown"))

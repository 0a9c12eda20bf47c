"""Which route answers a request: its path with its parameters' names, so that there are few of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_ENDPOINT = "lorafleet.endpoint"  # in the ASGI scope


def set_endpoint(scope: MutableMapping[str, Any], path: str) -> None:
    scope[_ENDPOINT] = path


def endpoint_of(scope: MutableMapping[str, Any]) -> str:
    """`unknown` where no route has taken it."""
    return str(scope.get(_ENDPOINT, "unknown"))

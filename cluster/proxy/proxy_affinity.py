"""Adds affinity to Ray Serve's own proxy, which chooses a replica before it has read the body.

A middleware in the proxy reads the beginning of the body, and sends the route along as the request's session, which
Serve passes to the router. Serve finds the middleware through its environment (PROXY_MIDDLEWARES in
serve_environment.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware import Middleware

from lorafleet.cluster.routing.route import read_route
from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES

SESSION_HEADER = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")  # Serve's own setting.

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


def middlewares() -> list[Middleware]:
    """Returns the middlewares of the proxy. Serve calls this when a proxy starts."""
    return [Middleware(TellRoute)]


class TellRoute:
    """An ASGI middleware that adds the route of each POST request as its session."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        begun, body = await _beginning(receive)
        session = (SESSION_HEADER.encode(), read_route(body).to_session().encode())

        async def receive_all() -> Message:
            return begun.popleft() if begun else await receive()

        # If there are several such headers, Serve uses the last one.
        await self._app(scope | {"headers": [*scope["headers"], session]}, receive_all, send)


async def _beginning(receive: Receive) -> tuple[deque[Message], bytes]:
    """Reads at least ROUTED_BODY_BYTES of the body, or all of it. Returns the messages, which must be passed on, and
    the beginning of the body."""
    messages: deque[Message] = deque()
    body = bytearray()
    more = True
    while more and len(body) < ROUTED_BODY_BYTES:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        more = message.get("more_body", False)  # It is absent if the client has disconnected.
    return messages, bytes(body[:ROUTED_BODY_BYTES])

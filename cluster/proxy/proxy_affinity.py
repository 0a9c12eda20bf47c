"""Affinity behind Ray Serve's own proxy, which asks for a replica before it has read the body.

A middleware in the proxy reads how the body begins, and sends the route along as the request's session, which Serve
hands to the router. Serve finds it by its environment, see PATH in serve_environment.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware import Middleware

from lorafleet.cluster.routing.route import read_route
from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES

SESSION_HEADER = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")  # Serve's own setting

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


def middlewares() -> list[Middleware]:
    """Called by Serve when a proxy starts."""
    return [Middleware(TellRoute)]


class TellRoute:
    """ASGI."""

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

        # Of several such headers Serve takes the last one.
        await self._app(scope | {"headers": [*scope["headers"], session]}, receive_all, send)


async def _beginning(receive: Receive) -> tuple[deque[Message], bytes]:
    """What came, to be given on, and the body in it."""
    messages: deque[Message] = deque()
    body = bytearray()
    more = True
    while more and len(body) < ROUTED_BODY_BYTES:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        more = message.get("more_body", False)  # there is none where the client has left
    return messages, bytes(body[:ROUTED_BODY_BYTES])

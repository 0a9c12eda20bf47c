"""Answers HAProxy when it asks for a replica. Every request waits for this, so it is a small ASGI application
without a framework."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers

from lorafleet.api.telemetry.traced import ROUTED_HEADER
from lorafleet.cluster.routing.route import NO_ROUTE, Route, read_route
from lorafleet.protocol.outside.header_numbers import header_number

NUM_BYTES_HEADER = "x-body-bytes"  # Size of the whole body. Of a large one, route.lua sends only both ends.

Message = dict[str, Any]


class RouteApp:
    """Answers `POST /internal/route` with {"replica_id": …}.

    Args:
        admits: Returns whether the client that sent these headers has a key. If it has none, the body is not read,
            as any replica can reject the request.
        traced: Whether to send the replica the time that routing took, for its traces.
    """

    def __init__(
        self,
        choose: Callable[[Route], Awaitable[str]],
        *,
        admits: Callable[[Headers], bool] = lambda _: True,
        traced: bool = False,
    ) -> None:
        self._choose = choose
        self._admits = admits
        self._traced = traced

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            began_ns = time.time_ns()
            headers = Headers(scope=scope)
            route = NO_ROUTE
            if self._admits(headers):
                body = await _body(receive)
                route = read_route(body, header_number(headers.get(NUM_BYTES_HEADER, "")) or len(body))
            replica_id = await self._choose(route)
            took = {ROUTED_HEADER: f"{began_ns} {time.time_ns() - began_ns}"} if self._traced else {}
            await _answer(send, {"replica_id": replica_id, "request_headers": took})


async def _lifespan(receive: Callable[[], Awaitable[Message]], send: Any) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Any, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

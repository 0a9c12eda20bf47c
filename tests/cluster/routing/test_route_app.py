"""What HAProxy asks for a replica: the application of the router, without Ray Serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from lorafleet.cluster.routing.route import NO_ROUTE, Route
from lorafleet.cluster.routing.route_app import RouteApp


async def ask(app: RouteApp, headers: dict[str, str], body: bytes) -> tuple[dict[str, Any], int]:
    """The answer, and how many pieces of the body were read."""
    pieces, answer = [body[:10], body[10:]], b""
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": pieces[num_read - 1], "more_body": num_read < len(pieces)}

    async def send(message: dict[str, Any]) -> None:
        nonlocal answer
        answer += message.get("body", b"")

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "headers": raw}, receive, send)
    return json.loads(answer), num_read


@pytest.mark.parametrize(("key", "is_read"), [("good", True), ("bad", False), (None, False)])
async def test_only_the_body_of_a_client_with_a_key_is_read(key: str | None, is_read: bool) -> None:
    routes: list[Route] = []

    async def choose(route: Route) -> str:
        routes.append(route)
        return "replica"

    def admits(headers: Headers) -> bool:
        return headers.get("authorization") == "Bearer good"

    body = b'{"model": "sql", "prompt": "x"}'
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer, num_read = await ask(RouteApp(choose, admits=admits), headers, body)
    assert answer["replica_id"] == "replica"
    assert num_read == (2 if is_read else 0)
    assert routes == [Route("sql", len(body) // 4) if is_read else NO_ROUTE]

"""The middleware that reads a route in Serve's own proxy, and what it brings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.cluster.proxy_affinity import SESSION_HEADER, TellRoute
from lorafleet.cluster.route import read_route
from lorafleet.cluster.serve_environment import ROUTED_BODY_BYTES
from tests.cluster.harness import running_server

NAMES = [f"t{i}" for i in range(8)]


class App:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def __call__(self, scope: dict[str, Any], receive: Any, _send: Any) -> None:
        self.headers = scope["headers"]
        more = scope["type"] == "http"
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)


async def run(pieces: list[bytes], **scope: Any) -> tuple[App, list[bytes]]:
    """The application, and the pieces that were left when it was first asked."""
    app, left = App(), list(pieces)

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    when_called: list[bytes] = []

    async def noting(*arguments: Any) -> None:
        when_called.extend(left)
        await app(*arguments)

    asked = {"type": "http", "method": "POST", "headers": [(SESSION_HEADER.encode(), b"of the client")]} | scope
    await TellRoute(noting)(asked, receive, None)
    return app, when_called


async def test_the_route_is_told_last_and_the_body_arrives_whole() -> None:
    body = json.dumps({"prompt": "x" * 5000, "model": "sql"}).encode()
    app, _ = await run([body[:10], b"", body[10:3000], body[3000:]])
    assert app.body == body
    assert app.headers == [
        (SESSION_HEADER.encode(), b"of the client"),
        (SESSION_HEADER.encode(), read_route(body).to_session().encode()),
    ]
    assert read_route(body).name == "sql"


async def test_of_a_large_body_only_the_beginning_is_waited_for() -> None:
    pieces = [b'{"model": "sql", "prompt": "', *[b"y" * ROUTED_BODY_BYTES] * 3, b'"}']
    app, left = await run(pieces)
    assert app.body == b"".join(pieces)
    assert len(left) == 3
    assert b" sql" in app.headers[-1][1]


async def test_a_client_that_leaves_and_what_is_no_post_are_passed_on() -> None:
    app, _ = await run([])
    assert app.body == b"" and len(app.headers) == 2
    app, left = await run([b"body"], method="PUT")
    assert app.body == b"body" and left == [b"body"] and len(app.headers) == 1
    app, _ = await run([], type="lifespan")
    assert len(app.headers) == 1


def test_behind_serves_own_proxy_each_adapter_is_read_by_one_replica_only(tiny_model: Path, tmp_path: Path) -> None:
    for i, name in enumerate(NAMES):
        shutil.copytree(tiny_model.parent / "a0", tmp_path / "adapters" / name)
        config = tmp_path / "adapters" / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8 + i}))
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--num-replicas", "2"]
    arguments += ["--no-direct-streaming", "--lora-resolver-dir", str(tmp_path / "adapters")]
    arguments += ["--max-loras", "8", "--kv-cache-tokens", "4096"]
    with running_server(arguments, tmp_path / "serve.log") as url, httpx.Client(base_url=url, timeout=60) as client:
        for name in NAMES * 5:
            body = {"model": name, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [
            one for family in families for one in family.samples if one.name == "lorafleet_engine_lora_loads_total"
        ]
    assert sum(one.value for one in samples) == len(NAMES), samples
    assert all(one.value for one in samples) and len(samples) == 2, "both have some"

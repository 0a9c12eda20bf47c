"""The middleware that reads a route in Serve's own proxy, and what it brings."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lorafleet.cluster.proxy.proxy_affinity import SESSION_HEADER, TellRoute
from lorafleet.cluster.routing.route import read_route
from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES
from tests.cluster.answers import check_body_limit, logprobs
from tests.cluster.harness import RunningServer, serving
from tests.cluster.sockets import reachable_from_elsewhere

pytestmark = pytest.mark.xdist_group("own_server")
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


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two replicas behind Serve's own proxy, and NAMES to be found by a resolver."""
    folder = tmp_path_factory.mktemp("plain")
    for i, name in enumerate(NAMES):
        shutil.copytree(tiny_model.parent / "a0", folder / "adapters" / name)
        config = folder / "adapters" / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8 + i}))
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--num-replicas", "2"]
    arguments += ["--no-direct-streaming", "--lora-resolver-dir", str(folder / "adapters")]
    arguments += ["--max-loras", "8", "--kv-cache-tokens", "4096"]
    with pytest.MonkeyPatch.context() as patch:
        # Serve asks a replica how busy it is, and takes the next best one that answers where the machine is slow.
        patch.setenv("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "30")
        with serving(arguments, folder / "serve.log", signal.SIGTERM) as running:
            yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as made:
        yield made


def samples(client: httpx.Client, name: str) -> list[Sample]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return [one for family in families for one in family.samples if one.name == name]


def test_behind_serves_own_proxy_an_adapters_requests_stay_at_one_replica(client: httpx.Client) -> None:
    def ask_all() -> None:
        for name in NAMES:
            body = {"model": name, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

    def answered() -> dict[str, dict[str, float]]:
        """Requests of each adapter by replica."""
        found: dict[str, dict[str, float]] = {name: {} for name in NAMES}
        for one in samples(client, "lorafleet_requests_total"):
            found.get(one.labels["model_name"], {})[one.labels["replica"]] = one.value
        return found

    ask_all()
    deadline_s = time.monotonic() + 60
    # The directory has heard who holds what. It may have had more copies read: at first each takes all of the load.
    while [one.value for one in samples(client, "lorafleet_directory_placed_adapters")] != [len(NAMES)]:
        assert time.monotonic() < deadline_s
        ask_all()
    before = answered()
    for _ in range(4):
        ask_all()
    homes = set()
    for name, now in answered().items():
        grown = {replica: count - before[name].get(replica, 0) for replica, count in now.items()}
        [(home, count)] = [(replica, count) for replica, count in grown.items() if count]
        assert count == 4, name
        homes.add(home)
    assert len(homes) == 2, "both have some"


def test_behind_serves_own_proxy_all_else_is_as_behind_haproxy(client: httpx.Client, server: RunningServer) -> None:
    assert logprobs(client, "base") != logprobs(client, "t0")
    assert "lorafleet_scrape_complete 1" in client.get("/metrics").text
    assert reachable_from_elsewhere(server.pid) == []
    for declared in (True, False):
        check_body_limit(client, declared)

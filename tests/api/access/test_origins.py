"""Which web pages may use a server that asks for no key."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.access import Access
from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import ANONYMOUS
from lorafleet.api.access.gate import Gate, KnownKey
from lorafleet.api.access.origins import Origins
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.config import AppArgs

BODY = {"model": "llama", "prompt": "a", "max_tokens": 2}
APP = "https://app.example.org"


async def asked(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY, headers=headers)


async def test_a_page_of_another_site_is_refused_by_name_with_the_remedy(http: httpx.AsyncClient) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "x" * 5000):
        response = await asked(http, origin=origin)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "forbidden"), origin
        assert origin[:100] in error["message"] and "--allowed-origins" in error["message"]
        assert len(error["message"]) < 500


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/sql", "/metrics"])
async def test_reading_is_refused_to_other_sites_too(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path, headers={"origin": "https://evil.example"})).status_code == 403
    assert (await http.get(path, headers={"host": "evil.example:8000"})).status_code == 403
    assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-mode": "no-cors"},
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)
async def test_an_image_of_another_site_s_page_flushes_no_cache(
    front: AppState, method: str, headers: dict[str, str]
) -> None:
    flushed: list[str] = []

    async def flush(_: AppState, request: Request) -> Response:
        await begin(request)
        flushed.append(request.method)
        return Response()

    routes: list[Any] = [("GET", "/flush_cache", "loading", flush), ("POST", "/flush_cache", "loading", flush)]
    transport = httpx.ASGITransport(build_api(lambda: front, routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        refused = await http.request(method, "/flush_cache", headers=headers)
        assert (refused.status_code, flushed) == (403, [])
        assert (await http.get("/flush_cache")).status_code == 200  # A program, as SGLang's clients.
        assert (await http.post("/flush_cache", headers=headers)).status_code == 200  # From a page it has an Origin.
    assert flushed == ["GET", "POST"]


async def test_a_name_that_was_made_to_lead_here_is_refused(http: httpx.AsyncClient) -> None:
    """The page's Origin and Host agree then."""
    response = await asked(http, origin="http://evil.example:8000", host="evil.example:8000")
    assert response.status_code == 403 and "'evil.example:8000'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost:8000", "LOCALHOST", "lab.localhost:1", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7"]
)
async def test_the_servers_own_pages_and_programs_go_on_to_work(http: httpx.AsyncClient, host: str) -> None:
    assert (await asked(http, host=host)).status_code == 200
    assert (await asked(http, host=host, origin=f"http://{host}")).status_code == 200


@pytest.mark.parametrize("host", ["[", "[::1", "a]b", "[v1.x]", ""])
async def test_what_is_no_host_is_refused_as_any_other_name_is(http: httpx.AsyncClient, host: str) -> None:
    for origin in ({}, {"origin": "http://["}):
        response = await asked(http, host=host, **origin)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


async def test_what_tells_nothing_is_open_to_all(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping", "/version", "/openapi.json", "/docs"):
        assert (await http.get(path, headers={"origin": "https://evil.example"})).status_code == 200


async def test_an_allowed_origin_may_use_the_server_and_only_that(http: httpx.AsyncClient, front: Any) -> None:
    front.config = dataclasses.replace(front.config, origins=Origins((APP,)))
    assert (await asked(http, origin=APP)).status_code == 200
    assert (await asked(http, origin=APP, host="app.example.org")).status_code == 200
    assert (await asked(http, origin="http://app.example.org")).status_code == 403
    assert (await asked(http, origin=APP + ".evil.example")).status_code == 403
    front.config = dataclasses.replace(front.config, origins=Origins(("*",)))
    assert (await asked(http, origin="https://evil.example", host="evil.example")).status_code == 200


async def test_a_server_that_listens_elsewhere_may_have_any_name(http: httpx.AsyncClient, front: Any) -> None:
    front.config = dataclasses.replace(front.config, origins=Origins(only_loopback=False))
    assert (await asked(http, host="gpu1:8000", origin="http://gpu1:8000")).status_code == 200
    assert (await asked(http, host="gpu1:8000", origin="https://evil.example")).status_code == 403


async def test_with_keys_the_key_decides(http: httpx.AsyncClient, front: Any) -> None:
    front.access = Access(Gate(keys=lambda: {hashlib.sha256(b"secret").hexdigest(): KnownKey(ANONYMOUS)}))
    assert (await asked(http, origin="https://evil.example")).status_code == 401
    key = {"authorization": "Bearer secret"}
    assert (await asked(http, origin="https://evil.example", host="gpu1", **key)).status_code == 200


@pytest.fixture
async def with_cors(front: Any) -> AsyncIterator[httpx.AsyncClient]:
    front.config = dataclasses.replace(front.config, origins=Origins((APP,)))
    api: Any = build_api(lambda: front)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as client:
        yield client


async def test_browsers_are_told_which_origins_may_read_answers(with_cors: httpx.AsyncClient) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    response = await with_cors.options("/v1/completions", headers=preflight | {"origin": APP})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, APP)
    response = await with_cors.options("/v1/completions", headers=preflight | {"origin": "https://evil.example"})
    assert response.status_code == 400 and "access-control-allow-origin" not in response.headers
    assert (await asked(with_cors, origin=APP)).headers["access-control-allow-origin"] == APP


async def test_browsers_are_told_of_origins_that_change_while_the_server_runs(
    with_cors: httpx.AsyncClient, front: Any
) -> None:
    front.change_config(dataclasses.replace(front.config, origins=Origins(("https://other.example",))))
    assert "access-control-allow-origin" not in (await asked(with_cors, origin=APP)).headers
    told = (await asked(with_cors, origin="https://other.example")).headers
    assert told["access-control-allow-origin"] == "https://other.example"
    front.change_config(dataclasses.replace(front.config, origins=Origins()))
    assert "access-control-allow-origin" not in (await asked(with_cors, origin="https://other.example")).headers


@pytest.mark.parametrize("origin", ["app.example.org", "https://app.example.org/", "https://", "", "null"])
def test_an_option_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        AppArgs(model="m", allowed_origins=[origin])

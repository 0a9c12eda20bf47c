"""What a client sees of a full queue and of a deadline that passed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import httpx
import openai
import pytest

from lorafleet.protocol.errors import QueueFull, QueueTimeout

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "sql", "prompt": "a", "max_tokens": 2, "n": 2},
    "/v1/chat/completions": {"model": "sql", "messages": [{"role": "user", "content": "a"}], "n": 2},
    "/generate": {"text": ["a", "b"], "lora_path": ["sql", None]},
}
PATHS = pytest.mark.parametrize("path", BODIES)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "code"), [(QueueFull, "queue_full"), (QueueTimeout, "queue_timeout")])
async def test_a_refusal_is_429_with_retry_after_in_openais_form(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool, kind: Any, code: str
) -> None:
    engine.fail_after, engine.failure = 0, kind("too many wait", retry_after_s=6.2)
    response = await http.post(path, json=BODIES[path] | {"stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    error = response.json()["error"]
    assert error == {"message": "too many wait", "type": "rate_limit_error", "param": None, "code": code}


def test_openai_python_knows_it_and_tries_again_when_told(base_url: str, engine: Any) -> None:
    engine.fail_after, engine.failure = 0, QueueFull("too many wait", retry_after_s=0.01)
    started = time.monotonic()
    with (
        openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model="llama", prompt="a")
    assert caught.value.code == "queue_full"
    assert len(engine.requests) == 2 and time.monotonic() - started > 0.9


@PATHS
async def test_the_header_or_the_servers_setting_goes_to_the_engine_less_the_time_that_has_passed(
    http: httpx.AsyncClient, engine: Any, front: Any, path: str
) -> None:
    await http.post(path, json=BODIES[path])
    assert {request.queue_timeout_s for request in engine.requests} == {None}
    front.config = dataclasses.replace(front.config, queue_timeout_s=30.0)
    for header, least, most in ((None, 0, 30), ("60.5", 30, 60.5), ("0", 0, 0), ("900", 800, 900)):
        engine.requests.clear()
        await http.post(path, json=BODIES[path], headers={"X-Queue-Timeout-Seconds": header} if header else {})
        assert len(engine.requests) == 2
        assert all(least <= request.queue_timeout_s <= most for request in engine.requests)
        assert len({request.group for request in engine.requests}) == 1
        assert engine.requests[0].group


@PATHS
@pytest.mark.parametrize("header", ["soon", "-1", "nan", "inf", ""])
async def test_a_bad_header_is_a_400_that_names_it(http: httpx.AsyncClient, path: str, header: str) -> None:
    response = await http.post(path, json=BODIES[path], headers={"x-queue-timeout-seconds": header})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Queue-Timeout-Seconds")


@PATHS
async def test_an_adapter_that_is_not_found_in_time_is_429_and_its_search_goes_on(
    http: httpx.AsyncClient, catalog: Any, path: str, monkeypatch: Any
) -> None:
    slow = asyncio.Event()

    async def resolve(name: str, _: str | None, __: str) -> Any:
        await asyncio.wait_for(slow.wait(), 60)
        return catalog.loras[name]

    monkeypatch.setattr(catalog, "resolve", resolve)
    response = await http.post(path, json=BODIES[path], headers={"x-queue-timeout-seconds": "0.2"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_timeout")
    assert "retry-after" in response.headers and not slow.is_set()


async def test_a_timeout_of_the_catalogues_own_is_not_called_the_requests(
    http: httpx.AsyncClient, catalog: Any, monkeypatch: Any
) -> None:
    async def resolve(_: str, __: str | None, ___: str) -> Any:
        raise TimeoutError("the store is silent")

    monkeypatch.setattr(catalog, "resolve", resolve)
    headers = {"x-queue-timeout-seconds": "60"}
    response = await http.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
    assert response.status_code == 500

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lorafleet.workers.messages import EngineStats
from lorafleet.workers.openai.metrics import MAX_ADAPTER_LABELS, Metrics


async def test_health_follows_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    for path in ("/health", "/ping"):
        assert (await http.get(path)).status_code == 200
    assert (await http.post("/ping")).status_code == 200
    engine.dead = "CUDA error"
    response = await http.get("/health")
    assert response.status_code == 503
    assert "CUDA error" in response.json()["error"]["message"]


async def test_version_is_told(http: httpx.AsyncClient) -> None:
    assert re.match(r"\d+\.", (await http.get("/version")).json()["version"])


async def test_metrics_count_requests_tokens_and_times(http: httpx.AsyncClient) -> None:
    for model in ("llama", "sql", "sql", "gpt"):
        await http.post("/v1/completions", json={"model": model, "prompt": [1, 2], "max_tokens": 3, "stream": True})
    await http.get("/nowhere")
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    requests = 'lorafleet_requests_total{endpoint="/v1/completions",model="%s",status="%s"}'
    assert values[requests % ("sql", 200)] == "2.0"
    assert values[requests % ("base", 200)] == "1.0"
    assert values[requests % ("", 404)] == "1.0"
    assert values['lorafleet_requests_total{endpoint="unknown",model="",status="404"}'] == "1.0"
    assert values['lorafleet_prompt_tokens_total{model="sql"}'] == "4.0"
    assert values['lorafleet_generation_tokens_total{model="sql"}'] == "6.0"
    assert values['lorafleet_time_to_first_token_seconds_count{kind="adapter"}'] == "2.0"
    assert values['lorafleet_inter_token_latency_seconds_count{kind="adapter"}'] == "4.0"
    assert values['lorafleet_e2e_request_latency_seconds_bucket{kind="base",le="+Inf"}'] == "1.0"
    assert values["lorafleet_engine_num_running"] == "3.0"
    assert values["lorafleet_engine_lora_loads_total"] == "7.0"


def test_metrics_name_at_most_100_adapters() -> None:
    metrics = Metrics(EngineStats)
    labels = {metrics.adapter_label(f"adapter-{i}") for i in range(500)}
    assert len(labels) == MAX_ADAPTER_LABELS + 1
    assert metrics.adapter_label("adapter-0") == "adapter-0"
    assert metrics.adapter_label("adapter-499") == "other"


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_sequences(
    http: httpx.AsyncClient, engine: Any, path: str, n: int, hold_after: int, stream: bool
) -> None:
    engine.hold_after = hold_after
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "n": n},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": n},
        "/generate": {"text": "a", "sampling_params": {"n": n}},
    }
    body = bodies[path]
    task = asyncio.create_task(http.post(path, json=body | {"stream": stream}))
    await until(lambda: len(engine.running) == n)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.running)
    engine.hold_after = None
    assert (await http.post(path, json=body)).status_code == 200


async def test_tokens_come_while_the_engine_still_works(http: httpx.AsyncClient, engine: Any) -> None:
    engine.hold_after = 2
    body = {"prompt": "a", "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        first = await anext(response.aiter_text())
        assert first.startswith("data: {")
        assert engine.running
    await until(lambda: not engine.running)

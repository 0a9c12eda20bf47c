from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lorafleet.api.telemetry.adapter_labels import MAX_LABELS, AdapterLabels
from lorafleet.api.telemetry.http_metrics import Metrics, Stopwatch, text_of
from lorafleet.protocol.histogram import Distribution
from lorafleet.protocol.messages import AdapterMove, EngineStats, GPUSteps, StepStats
from lorafleet.protocol.step_metrics import STEP_S


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


async def scraped(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_metrics_count_requests_tokens_and_times(http: httpx.AsyncClient, engine: Any) -> None:
    for model in ("llama", "sql", "sql", "gpt"):
        await http.post("/v1/completions", json={"model": model, "prompt": [1, 2], "max_tokens": 3, "stream": True})
    await http.get("/nowhere")
    engine.fail_after = 1
    await http.post("/v1/completions", json={"model": "sql", "prompt": "a"})
    engine.moved(AdapterMove("sql", "disk", "cpu", 0.25))
    engine.moved(AdapterMove("sql", "disk", "cpu", 0.5))
    engine.moved(AdapterMove("json", "disk", "cpu", 0.1, "AdapterMalformed"))
    engine.moved(AdapterMove("", "gpu", "none", 3.0))
    assert (await http.get("/metrics")).headers["content-type"].startswith("text/plain; version=")
    values = await scraped(http)
    requests = 'lorafleet_requests_total{endpoint="/v1/completions",model_name="%s",replica="",status="%s"}'
    assert values[requests % ("sql", 200)] == 2
    assert values[requests % ("llama", 200)] == 1
    assert values[requests % ("", 404)] == 1
    assert values['lorafleet_requests_total{endpoint="unknown",model_name="",replica="",status="404"}'] == 1
    sql = 'model_name="sql",replica=""'
    assert values[f"vllm:prompt_tokens_total{{{sql}}}"] == 5
    assert values[f"vllm:generation_tokens_total{{{sql}}}"] == 7
    assert values[f'vllm:request_success_total{{finished_reason="length",{sql}}}'] == 2
    assert values[f'vllm:request_success_total{{finished_reason="error",{sql}}}'] == 1
    assert values[f"vllm:time_to_first_token_seconds_count{{{sql}}}"] == 3
    assert values[f"vllm:request_queue_time_seconds_count{{{sql}}}"] == 3
    assert values[f"vllm:request_queue_time_seconds_sum{{{sql}}}"] == pytest.approx(0.6)
    assert values[f'vllm:request_queue_time_seconds_bucket{{le="0.1",{sql}}}'] == 0
    assert values[f'lorafleet_adapter_hits_total{{{sql},tier="cpu"}}'] == 3
    assert values[f'lorafleet_adapter_load_seconds_count{{{sql},tier="disk"}}'] == 2
    assert values[f'lorafleet_adapter_load_seconds_sum{{{sql},tier="disk"}}'] == 0.75
    assert values[f"vllm:inter_token_latency_seconds_count{{{sql}}}"] == 4
    assert values['vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="llama",replica=""}'] == 1
    for rank, sequences, gaps in ((0, 1, 2), (16, 3, 4)):
        assert values[f'lorafleet_rank_time_to_first_token_seconds_count{{rank="{rank}",replica=""}}'] == sequences
        assert values[f'lorafleet_rank_inter_token_latency_seconds_count{{rank="{rank}",replica=""}}'] == gaps
    moves = 'lorafleet_adapter_move_seconds_sum{replica="",source="%s",target="%s"}'
    assert (values[moves % ("disk", "cpu")], values[moves % ("gpu", "none")]) == (0.75, 3)
    assert values[moves % ("remote", "disk")] == 0, "shown before the first"
    assert values['lorafleet_adapter_load_failures_total{error="AdapterMalformed",replica=""}'] == 1
    assert not any("lorafleet_adapter_hits" in name and "llama" in name for name in values)


async def test_metrics_show_what_the_engine_tells(http: httpx.AsyncClient, engine: Any) -> None:
    told = EngineStats(
        num_running=3,
        num_waiting=4,
        kv_blocks_total=10,
        kv_blocks_free=4,
        preemptions_total=2,
        refused_total={"tokens": 9},
        lora_slots_total=8,
        lora_slots_used=5,
        lora_evictions_total=6,
        lora_cpu_evictions_total=7,
        lora_slot_bytes=1000,
        lora_cpu_bytes=3000,
        lora_load_failures_total=9,
        steps=StepStats(
            seconds={"decode": Distribution([0, 2] + [0] * (len(STEP_S) - 1), 0.003)},
            base_tokens=30,
            adapter_tokens=10,
            on_gpu=[GPUSteps("decode", True, 8, 3, 0.015)],
        ),
        memory_bytes={"weights": 5000},
    )
    engine.stats = told
    values = await scraped(http)
    at = '{replica=""}'
    assert (values["vllm:num_requests_running" + at], values["vllm:num_requests_waiting" + at]) == (3, 4)
    assert values["vllm:kv_cache_usage_perc" + at] == pytest.approx(0.6)
    assert values["vllm:num_preemptions_total" + at] == 2
    assert values['lorafleet_engine_refused_total{bound="tokens",replica=""}'] == 9
    assert (values["lorafleet_engine_lora_slots" + at], values["lorafleet_engine_lora_slots_used" + at]) == (8, 5)
    assert values["lorafleet_engine_lora_load_failures_total" + at] == 9
    steps = 'lorafleet_engine_step_seconds_bucket{kind="%s",le="%s",replica=""}'
    assert [values[steps % ("decode", le)] for le in ("0.001", "0.002", "+Inf")] == [0, 2, 2]
    assert values[steps % ("prefill", "+Inf")] == 0, "shown before the first"
    assert values['lorafleet_engine_step_tokens_total{lora="adapter",replica=""}'] == 10
    gpu = 'lorafleet_engine_gpu_step_seconds_%s{kind="decode",lora="adapter",replica="",tokens="8"}'
    assert (values[gpu % "count"], values[gpu % "sum"]) == (3, 0.015)
    assert values['lorafleet_engine_memory_bytes{kind="weights",replica=""}'] == 5000
    for tier, size, gone in (("gpu", 1000, 6), ("cpu", 3000, 7)):
        assert values[f'lorafleet_engine_lora_bytes{{replica="",tier="{tier}"}}'] == size
        assert values[f'lorafleet_engine_lora_evictions_total{{replica="",tier="{tier}"}}'] == gone


def test_metrics_stay_bounded_and_lose_nothing_however_many_adapters_there_are() -> None:
    metrics = Metrics(EngineStats, "base", "r")
    for i in range(5000):
        label = metrics.adapters.count(f"adapter-{i}")
        metrics.count_request("/v1/completions", label, 200)
        metrics.count_sequence(label, 10, 3, Stopwatch(), "length")
    text = text_of(list(metrics.collect())).decode()
    tokens = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert len(tokens) <= MAX_LABELS + 2
    assert sum(float(line.rsplit(" ", 1)[1]) for line in tokens) == 50_000
    assert len(text.splitlines()) < 5000


def test_a_label_that_changes_hands_takes_no_series_back() -> None:
    metrics = Metrics(EngineStats, "base", "r")
    now = [0.0]
    metrics.adapters = AdapterLabels(2, lambda: now[0])
    seen: dict[str, float] = {}

    def serve(name: str, times: int) -> None:
        for _ in range(times):
            metrics.count_sequence(metrics.adapters.count(name), 1, 1, Stopwatch(), "stop")
        now[0] += 1000
        for line in text_of(list(metrics.collect())).decode().splitlines():
            series, _, value = line.rpartition(" ")
            if "_total{" in series:
                assert float(value) >= seen.get(series, 0.0), line
                seen[series] = float(value)

    for name, times in (("a", 5), ("b", 5), ("c", 50), ("c", 50), ("a", 300), ("a", 300), ("b", 900), ("b", 900)):
        serve(name, times)
    assert metrics.adapters.shown == {"a", "b"}
    series = 'vllm:generation_tokens_total{model_name="%s",replica="r"}'
    counts = {name: seen[series % name] for name in ("a", "b", "c", "other")}
    assert sum(counts.values()) == 2510, "each request under one label"
    assert counts["c"] >= 50 and counts["other"] >= 1


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
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

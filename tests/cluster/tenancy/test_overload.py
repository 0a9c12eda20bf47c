"""More requests than a cluster of two replicas can take, through openai-python and HAProxy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.tenancy.tenants import REPLICAS, RUNNING, WAITING, Tenants

pytestmark = pytest.mark.xdist_group("tenants")
LONG = 900  # tokens: seconds on a CPU
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _idle(tenants: Tenants) -> None:
    """Nothing of the test before runs or waits any more."""
    deadline_s = time.monotonic() + PATIENCE_S
    while busy := num_busy(scrape(tenants)):
        assert time.monotonic() < deadline_s, busy
        time.sleep(0.1)


@pytest.fixture
async def client(tenants: Tenants) -> AsyncIterator[AsyncOpenAI]:
    async with crowd(tenants, max_retries=0) as made:
        yield made


def crowd(tenants: Tenants, max_retries: int) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{tenants.server.url}/v1", api_key=tenants.keys["crowd"], max_retries=max_retries, timeout=300
    )


async def stream(client: AsyncOpenAI, model: str = "base") -> tuple[Any, Any]:
    """A long answer that has begun, and its first chunk."""
    chunks = await client.completions.create(
        model=model, prompt="hello", max_tokens=LONG, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return chunks, await anext(chunks)


async def rest_of(chunks: Any) -> str:
    reasons = [choice.finish_reason async for chunk in chunks for choice in chunk.choices]
    return str(reasons[-1])


async def test_what_cannot_be_queued_is_429_with_retry_after_and_the_rest_runs_on(
    tenants: Tenants, client: AsyncOpenAI
) -> None:
    asked = [
        client.completions.create(
            model=("base", "a0", "a1")[i % 3], prompt="hi", max_tokens=LONG, extra_body={"ignore_eos": True}
        )
        for i in range(20)
    ]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
    served = [one for one in answers if not isinstance(one, BaseException)]
    assert len(refused) + len(served) == 20, answers
    assert len(served) >= RUNNING + WAITING, answers
    assert refused, "how many depends on how soon all had come, beside answers of seconds"
    assert {one.usage.completion_tokens for one in served} == {LONG}
    for one in refused:
        assert one.code == "queue_full" and "max_queued_requests=1" in str(one)
        assert int(one.response.headers["retry-after"]) >= 1
    counted = [value for labels, value in scrape(tenants)["lorafleet_requests_total"] if labels["status"] == "429"]
    assert sum(counted) >= len(refused)


async def test_who_cannot_start_in_time_is_429_and_streams_are_not_cut(client: AsyncOpenAI) -> None:
    models = ["base", "a0", "a1"] * 4
    hasty = client.with_options(default_headers={"X-Queue-Timeout-Seconds": "0.05"})
    codes: set[str | None] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while "queue_timeout" not in codes:  # on a quick machine the streams may end before the hasty requests come
        asked = await asyncio.gather(*(stream(client, model) for model in models[:4]), return_exceptions=True)
        streams = [one for one in asked if not isinstance(one, BaseException)]
        short = [hasty.completions.create(model=model, prompt="hi", max_tokens=2) for model in models]
        answers = await asyncio.gather(*short, return_exceptions=True)
        codes = {one.code for one in answers if isinstance(one, openai.RateLimitError)}
        assert await asyncio.gather(*(rest_of(chunks) for chunks, _ in streams)) == ["length"] * len(streams)
        assert time.monotonic() < deadline_s, f"{len(streams)} streams ran; the others were answered {answers}"


async def test_clients_that_try_again_when_told_are_all_served(tenants: Tenants) -> None:
    async with crowd(tenants, max_retries=60) as client:
        asked = [client.completions.create(model="a1", prompt="hi", max_tokens=200) for _ in range(16)]
        assert len(await asyncio.gather(*asked)) == 16


async def test_one_scrape_shows_every_replica_and_what_each_adapter_was_given(
    tenants: Tenants, client: AsyncOpenAI
) -> None:
    before = scrape(tenants)
    usage = []
    for model in ("base", "a0", "a1", "a0"):  # one after another: nobody is refused
        answer = await client.completions.create(
            model=model, prompt="hi there", max_tokens=5, extra_body={"ignore_eos": True}
        )
        usage.append(answer.usage)
    after = scrape(tenants)
    for metrics in (before, after):
        assert len({labels["replica"] for labels, _ in metrics["vllm:num_requests_running"]}) == REPLICAS
        assert metrics["lorafleet_scrape_complete"] == [({}, 1.0)]

    def grown(metric: str, **wanted: str) -> float:
        def total(metrics: Scrape) -> float:
            return sum(value for labels, value in metrics.get(metric, []) if wanted.items() <= labels.items())

        return total(after) - total(before)

    prompt_tokens = usage[0].prompt_tokens
    assert grown("vllm:prompt_tokens_total", model_name="a0") == 2 * prompt_tokens
    assert grown("vllm:generation_tokens_total", model_name="a0") == 10
    assert grown("vllm:generation_tokens_total", model_name="base") == 5
    assert grown("vllm:time_to_first_token_seconds_count", model_name="a1") == 1
    assert grown("vllm:request_queue_time_seconds_count", model_name="a1") == 1
    assert grown("lorafleet_adapter_hits_total", model_name="a0") == 2
    assert grown("lorafleet_requests_total", model_name="a0", status="200", endpoint="/v1/completions") == 2
    loads = {labels["model_name"]: value for labels, value in after["lorafleet_adapter_load_seconds_count"]}
    assert loads["a0"] >= 1 and loads["a1"] >= 1
    sizes = {labels["tier"] for labels, value in after["lorafleet_engine_lora_bytes"] if value > 0}
    assert sizes == {"gpu", "cpu"}


BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
Scrape = dict[str, list[tuple[dict[str, str], float]]]


def scrape(tenants: Tenants) -> Scrape:
    """Labels and values by series' name."""
    found: Scrape = {}
    headers = {"authorization": f"Bearer {tenants.keys['scraper']}"}
    text = httpx.get(f"{tenants.server.url}/metrics", headers=headers, timeout=30).text
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append((dict(one.labels), one.value))
    return found


def num_busy(metrics: Scrape) -> float:
    """Requests that run or wait at the replicas. Infinity where a replica has not answered the scrape."""
    if metrics["lorafleet_scrape_complete"] != [({}, 1.0)]:
        return float("inf")
    return sum(value for name in BUSY for _, value in metrics[name])

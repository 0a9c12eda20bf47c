"""The unchanged OpenAI client uploads files and runs batches, and each line is answered exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from lorafleet.cluster.batches.batch_metrics import BatchMetrics
from lorafleet.cluster.batches.line_post import LinePost, LineReply
from lorafleet.cluster.batches.log_journal import usage_of
from lorafleet.protocol.limits import BACKGROUND
from tests.cluster.batches.conftest import House, chat_line, created, ended, ids, read_lines, until


async def test_a_batch_is_uploaded_run_polled_and_downloaded_by_the_client(house: House) -> None:
    client = house.client()
    lines = [chat_line(i) for i in range(9)]
    lines[3]["body"]["model"] = "nothing"
    lines[4]["body"]["model"] = "sql"
    batch = await created(client, lines, metadata={"purpose": "test"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"purpose": "test"})
    assert batch.expires_at == batch.created_at + 24 * 3600

    async with house.running() as runner:
        batch = await ended(client, batch.id)
        await until(lambda: not runner.num_running)
        metrics = {(s.name, *s.labels.values()): s.value for m in BatchMetrics(runner).collect() for s in m.samples}
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 9, "completed": 8, "failed": 1}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at) == (None, None, None)
    answers, errors = await read_lines(client, batch.output_file_id), await read_lines(client, batch.error_file_id)
    assert ids(answers, errors) == Counter(f"id {i}" for i in range(9))
    assert ids(errors) == Counter(["id 3"])
    assert errors[0]["response"]["status_code"] == 404
    assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"
    of_sql = next(answer for answer in answers if answer["custom_id"] == "id 4")
    assert of_sql["response"]["body"]["choices"][0]["message"]["content"].startswith("sql")
    usage = [answer["response"]["body"]["usage"] for answer in answers]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in usage) > 0
    assert batch.usage.output_tokens == 8 * 3
    assert metrics["lorafleet_batches_ended_total", "completed"] == 1

    output = await client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_lines_of_a_batch_start_after_all_other_requests_and_are_their_tenants(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(i) for i in range(3)])
    async with house.running():
        await ended(client, batch.id)
    assert [request.priority for request in house.engine.requests] == [BACKGROUND] * 3
    assert {request.tenant for request in house.engine.requests} == {"acme"}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"model": "llama", "prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"model": "llama", "input": "a", "max_output_tokens": 16}),
    ],
)
async def test_other_endpoints_are_answered_with_their_usage(house: House, url: str, body: dict[str, Any]) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0, url=url, body=body)], endpoint=url)
    async with house.running():
        batch = await ended(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert batch.usage.total_tokens > 0


async def test_at_most_so_many_lines_are_in_flight(house: House) -> None:
    client, most, now = house.client(), 0, 0

    async def post(line: LinePost) -> LineReply:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return await house.answerer.answer(line)

    batches = [await created(client, [chat_line(i) for i in range(12)]) for _ in range(2)]
    async with house.running(house.runner(post, most_lines=3)):
        for batch in batches:
            await ended(client, batch.id)
    assert most == 3


@pytest.mark.parametrize(
    "raw", [b"{", b'{"response": null}', b'{"response": {"body": {"usage": null}}}', b'{"response": {"body": []}}']
)
def test_an_answer_without_usage_counts_nothing(raw: bytes) -> None:
    assert usage_of(raw).input_tokens == 0

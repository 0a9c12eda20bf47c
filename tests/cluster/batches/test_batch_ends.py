"""A batch that is canceled, expires, fails or has a faulty input says so, and keeps the answers that it has."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import KnownKey
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_log import LogEntry
from lorafleet.cluster.batches.batch_records import BatchStage, FileRecord
from lorafleet.cluster.batches.batch_store import BatchName
from lorafleet.cluster.batches.line_post import LinePost, LineReply
from lorafleet.cluster.tenancy.key_text import digest_of
from tests.cluster.batches.conftest import QUICK, House, chat_line, created, ended, ids, jsonl, read_lines, until


async def test_a_canceled_batch_has_its_answers_and_says_what_was_not_done(house: House) -> None:
    client, hold = house.client(), asyncio.Event()

    async def post(line: LinePost) -> LineReply:
        if b"number 2" in line.body:
            await hold.wait()
        return await house.answerer.answer(line)

    batch = await created(client, [chat_line(i) for i in range(5)])
    async with house.running(house.runner(post, most_lines=1)):
        await until(lambda: house.store.stage(batch.id).num_completed == 2)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    answers, errors = await read_lines(client, batch.output_file_id), await read_lines(client, batch.error_file_id)
    assert ids(answers) == Counter(["id 0", "id 1"])
    assert [line["error"]["code"] for line in errors] == ["batch_cancelled"] * 3
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_is_canceled_before_it_runs(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0)])
    await client.batches.cancel(batch.id)
    async with house.running():
        batch = await ended(client, batch.id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert not house.engine.requests


async def test_a_batch_that_expires_has_the_answers_so_far(house: House) -> None:
    client, hold = house.client(), asyncio.Event()

    async def post(line: LinePost) -> LineReply:
        if b"number 2" in line.body:
            house.now_s += 24 * 3600
            await hold.wait()
        return await house.answerer.answer(line)

    batch = await created(client, [chat_line(i) for i in range(4)])
    async with house.running(house.runner(post, most_lines=1)):
        batch = await ended(client, batch.id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    answers, errors = await read_lines(client, batch.output_file_id), await read_lines(client, batch.error_file_id)
    assert ids(answers) == Counter(["id 0", "id 1"])
    assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 2


async def test_a_batch_whose_key_was_revoked_fails(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0)])
    known = house.keys.pop(digest_of("key of acme"))
    async with house.running():
        await until(lambda: not house.store.open_names())
    house.keys[digest_of("key of acme")] = known
    batch = await client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "invalid_api_key"
    assert not house.engine.requests


@pytest.mark.parametrize("same_secret", [False, True])
async def test_a_batch_never_goes_on_as_the_next_holder_of_its_keys_name(house: House, same_secret: bool) -> None:
    client, answered = house.client(), asyncio.Event()
    known = house.keys[digest_of("key of acme")].caller

    async def post(line: LinePost) -> LineReply:
        if b"number 0" in line.body:
            return await house.answerer.answer(line)
        mark = known.key_mark if same_secret else "another mark"
        house.keys.pop(digest_of("key of acme"))
        house.keys[digest_of("its next key")] = KnownKey(Caller("umbrella", known.key_id, known.scopes, key_mark=mark))
        reply = await house.answerer.answer(line)
        answered.set()
        return reply

    batch = await created(client, [chat_line(number) for number in range(3)])
    [name] = house.store.open_names()
    async with house.running(house.runner(post, most_lines=1)):
        await answered.wait()
        await until(lambda: not house.store.open_names())
    stage = house.store.stage(batch.id)
    assert (stage.status, stage.errors[0].code) == ("failed", "invalid_api_key")
    assert (stage.num_completed, len(house.engine.requests)) == (1, 1), "the next holder sends nothing of it"
    record = house.store.find(name.owner, batch.id)
    assert record is not None and record.caller.key_mark == known.key_mark


async def test_the_name_of_a_key_without_a_tenant_opens_nothing_of_its_former_holder(house: House) -> None:
    scopes: Any = frozenset(("infer",))
    house.keys[digest_of("key of first")] = KnownKey(Caller(None, "app", scopes, key_mark="first's"))
    first, second = house.client("first"), house.client("second")
    batch = await created(first, [chat_line(0)])
    house.keys.pop(digest_of("key of first"))
    house.keys[digest_of("key of second")] = KnownKey(Caller(None, "app", scopes, key_mark="second's"))
    assert not (await second.files.list()).data and not (await second.batches.list()).data
    for asked in (second.files.content(batch.input_file_id), second.batches.cancel(batch.id)):
        with pytest.raises(openai.NotFoundError):
            await asked
    async with house.running():
        await until(lambda: not house.store.open_names())
    assert house.store.stage(batch.id).errors[0].code == "invalid_api_key" and not house.engine.requests


async def test_a_batch_of_a_record_without_an_identity_ends_instead_of_guessing(house: House) -> None:
    batch = await created(house.client(), [chat_line(0)])
    [name] = house.store.open_names()
    record = house.store.find(name.owner, name.batch_id)
    assert record is not None
    former = msgspec.json.encode({**msgspec.to_builtins(record), "key_id": "acme-1"} | {"key_mark": ""})
    store: Any = house.store._store
    store.delete(f"batches/{name.owner}.{name.batch_id}")
    store.create(f"batches/{name.owner}.{name.batch_id}", former)
    async with house.running():
        await until(lambda: not house.store.open_names())
    assert house.store.stage(batch.id).errors[0].code == "invalid_api_key" and not house.engine.requests


async def test_a_batch_whose_key_has_lost_its_scope_fails(house: House) -> None:
    batch = await created(house.client(), [chat_line(0)])
    digest = digest_of("key of acme")
    house.keys[digest] = KnownKey(dataclasses.replace(house.keys[digest].caller, scopes=frozenset(("metrics",))))
    async with house.running():
        await until(lambda: not house.store.open_names())
    assert house.store.stage(batch.id).errors[0].code == "invalid_api_key"
    assert not house.engine.requests


async def test_a_line_that_would_be_slow_to_parse_fails_its_batch_by_the_bound(house: House) -> None:
    client, line = house.client(), chat_line(1)
    line["body"]["user"] = ":" * 140_000
    batch = await created(client, [chat_line(0), line])
    async with house.running():
        batch = await ended(client, batch.id)
    assert batch.status == "failed"
    [fault] = batch.errors.data
    assert (fault.code, fault.line) == ("invalid_line", 2)
    assert "131072 colons" in fault.message
    assert not house.engine.requests


async def test_a_batch_that_ends_while_the_store_lists_it_ends_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, listed = house.client(), house.store.open_names
    num_late = 0

    async def late_answer(*arguments: Any) -> LineReply:
        await until(lambda: num_late > 0)
        return await house.answerer.answer(*arguments)

    async with house.running(house.runner(late_answer)) as runner:

        def late_names(owner: str = "") -> list[BatchName]:
            nonlocal num_late
            names = listed(owner)
            if runner.num_running and not owner:
                num_late += 1
                while runner.num_running:
                    time.sleep(0.01)
            return names

        monkeypatch.setattr(house.store, "open_names", late_names)
        await ended(client, (await created(client, [chat_line(i) for i in range(3)])).id)
        await until(lambda: not runner.num_running)
        await runner.look()
        await until(lambda: not runner.num_running)
        assert runner.endings["completed"] == 1


async def test_the_lease_is_renewed_while_what_has_expired_is_deleted(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def slow_care() -> None:
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(house.store, "care", slow_care)
    runner = house.runner()
    try:
        await asyncio.wait_for(runner.look(), 30)
        await until(begun.is_set)
        await asyncio.wait_for(runner.look(), 30)
    finally:
        may_end.set()


async def test_a_batch_that_cannot_go_on_does_not_occupy_its_place(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = house.client()
    broken = [await created(client, [chat_line(i)]) for i in range(bounds.MAX_RUNNING_OF_ONE)]
    whole = await created(client, [chat_line(9)])
    pieces = house.store.files.pieces

    def pieces_or_error(record: FileRecord) -> Iterator[bytes]:
        if record.file_id != whole.input_file_id and record.purpose == "batch":
            raise OSError("no space is left")
        return pieces(record)

    monkeypatch.setattr(house.store.files, "pieces", pieces_or_error)
    async with house.running(house.runner(timing=dataclasses.replace(QUICK, again_s=3600.0))):
        assert (await ended(client, whole.id)).status == "completed"
    assert {name.batch_id for name in house.store.open_names()} == {batch.id for batch in broken}


async def test_a_batch_that_ends_while_it_is_cancelled_stays_as_it_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0)])
    [name] = house.store.open_names()
    record, find_end = house.store.find(name.owner, name.batch_id), house.store.ended
    assert record is not None
    now_s = int(house.now_s)
    stage = BatchStage(status="completed", ending="completed", ended_s=now_s)
    house.store.log(batch.id).append(LogEntry(1, BatchStage(status="in_progress", writer="run"), b""))

    def ended_just_after(batch_id: str) -> BatchStage | None:
        found = find_end(batch_id)
        house.store.end(record, stage)
        return found

    monkeypatch.setattr(house.store, "ended", ended_just_after)
    with pytest.raises(openai.BadRequestError, match="completed"):
        await client.batches.cancel(batch.id)
    assert house.store._store.keys("batch-log/") == []


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"{\n", "invalid_line", 1),
        (jsonl([chat_line(0), chat_line(0)]), "invalid_input", None),
        (jsonl([chat_line(0), chat_line(1, url="/v1/completions")]), "mismatched_endpoint", 2),
        (jsonl([chat_line(0, method="GET")]), "invalid_line", 1),
        (b"\n", "invalid_input", None),
    ],
)
async def test_an_input_with_faults_fails_before_anything_is_sent(
    house: House, content: bytes, code: str, line: int | None
) -> None:
    client = house.client()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    async with house.running():
        batch = await ended(client, batch.id)
    assert (batch.status, batch.failed_at is not None) == ("failed", True)
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    assert not house.engine.requests

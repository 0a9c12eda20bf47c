"""The unchanged OpenAI client uploads files and runs batches; each line is answered exactly once, whatever ends."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import KnownKey
from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_log import LogEntry
from lorafleet.cluster.batches.batch_metrics import BatchMetrics
from lorafleet.cluster.batches.batch_records import BatchStage, FileRecord
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.batches.batch_store import BatchName
from lorafleet.cluster.batches.line_post import LinePost, LineReply
from lorafleet.cluster.batches.log_journal import LogJournal, TurnLost, usage_of
from lorafleet.protocol.errors import StoreError
from lorafleet.protocol.limits import BACKGROUND
from tests.cluster.batches.conftest import QUICK, House, chat_line, created, ended, jsonl, read_lines, until


def ids(*files: list[dict[str, Any]]) -> Counter[str]:
    return Counter(line["custom_id"] for file in files for line in file)


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


# -- the end of a process ---------------------------------------------------------------------------------------------


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("writes", range(1, 9))
async def test_a_batch_whose_process_is_killed_after_any_write_goes_on_exactly_once(house: House, writes: int) -> None:
    client = house.client()
    lines = [chat_line(i) for i in range(10)]
    lines[2]["body"]["model"] = "nothing"
    batch = await created(client, lines)
    create, left = house.store._store.create, [writes]

    def killed_create(key: str, content: bytes) -> bool:
        if not left[0]:
            raise _Killed
        left[0] -= 1
        return create(key, content)

    house.store._store.create = killed_create  # type: ignore[method-assign]  # the process ends at this write
    house.store.files._store.create = killed_create  # type: ignore[method-assign]
    first = house.runner()
    await first.look()
    await until(lambda: not first.num_running)
    house.store._store.create = house.store.files._store.create = create  # type: ignore[method-assign]
    async with house.running():
        batch = await ended(client, batch.id)
    assert batch.status == "completed"
    answers, errors = await read_lines(client, batch.output_file_id), await read_lines(client, batch.error_file_id)
    assert ids(answers, errors) == Counter(f"id {i}" for i in range(10))
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 9, "failed": 1}
    listed = await client.files.list()
    assert len(listed.data) == 3
    assert not house.store.open_names()


async def test_two_replicas_that_both_believe_to_run_a_batch_answer_each_line_once(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(i) for i in range(30)])
    async with house.running(), house.running():
        batch = await ended(client, batch.id)
    answers = await read_lines(client, batch.output_file_id)
    assert ids(answers) == Counter(f"id {i}" for i in range(30))
    assert batch.request_counts.completed == 30


async def test_answers_that_were_written_are_not_asked_again(house: House) -> None:
    client, hold = house.client(), asyncio.Event()
    asked: list[bytes] = []

    async def post(line: LinePost) -> LineReply:
        asked.append(line.body)
        if len(asked) > 6:
            await hold.wait()
        return await house.answerer.answer(line)

    batch = await created(client, [chat_line(i) for i in range(10)])
    async with house.running(house.runner(post, most_lines=1)):
        await until(lambda: house.store.stage(batch.id).num_completed == 6)
    async with house.running(house.runner(post, most_lines=1)):
        hold.set()
        batch = await ended(client, batch.id)
    assert Counter(Counter(asked).values()) == {1: 9, 2: 1}  # The one that was in flight.
    assert ids(await read_lines(client, batch.output_file_id)) == Counter(f"id {i}" for i in range(10))


async def test_a_store_that_is_away_for_a_moment_delays_a_batch_only(house: House) -> None:
    log, failures = house.store.log("batch_" + 32 * "0"), [2]
    append = log.append

    def failing(entry: LogEntry) -> bool:
        if failures[0]:
            failures[0] -= 1
            raise StoreError("away")
        return append(entry)

    log.append = failing  # type: ignore[method-assign]
    journal = LogJournal(log, "w", sleep=lambda _: None)
    journal.append([b'{"id": "batch_req_0123456789ab_1"}\n'])
    assert [entry.number for entry in log.entries()] == [1]


def test_a_journal_accepts_a_cancellation_and_refuses_another_run(house: House) -> None:
    log = house.store.log("batch_" + 32 * "1")
    first, second = LogJournal(log, "first"), LogJournal(log, "second")
    first.append([])
    with pytest.raises(TurnLost):
        second.append([])
    with pytest.raises(TurnLost):
        second.poll()
    house.store.cancel("batch_" + 32 * "1")
    first.append([])
    assert first.stage.status == "cancelling"
    last = log.last()
    assert last is not None
    assert last.number == 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_the_last_entry_is_found_in_few_reads(house: House, count: int) -> None:
    log = house.store.log("batch_" + 32 * "2")
    for number in range(1, count + 1):
        assert log.append(LogEntry(number, BatchStage(num_lines=number), b""))
    last = log.last()
    assert (0 if last is None else last.stage.num_lines) == count
    log.delete()
    assert log.last() is None


# -- ends -------------------------------------------------------------------------------------------------------------


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
    known = house.keys.pop(hashlib.sha256(b"key of acme").hexdigest())
    async with house.running():
        await until(lambda: not house.store.open_names())
    house.keys[hashlib.sha256(b"key of acme").hexdigest()] = known
    batch = await client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "invalid_api_key"
    assert not house.engine.requests


async def test_a_batch_whose_key_has_lost_its_scope_fails(house: House) -> None:
    batch = await created(house.client(), [chat_line(0)])
    digest = hashlib.sha256(b"key of acme").hexdigest()
    house.keys[digest] = KnownKey(Caller("acme", "acme-1", frozenset(("metrics",))))
    async with house.running():
        await until(lambda: not house.store.open_names())
    assert house.store.stage(batch.id).errors[0].code == "invalid_api_key"
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


# -- files and lists --------------------------------------------------------------------------------------------------


async def test_a_tenant_sees_only_its_own_files_and_batches(house: House) -> None:
    client, other = house.client(), house.client("umbrella")
    batch = await created(client, [chat_line(0)])
    with pytest.raises(openai.NotFoundError, match="no file"):
        await other.files.retrieve(batch.input_file_id)
    with pytest.raises(openai.NotFoundError, match="no file"):
        await other.files.content(batch.input_file_id)
    with pytest.raises(openai.NotFoundError, match="no file"):
        await other.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError, match="no batch"):
        await other.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError, match="no batch"):
        await other.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError, match="no file"):
        await other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert (await other.files.list()).data == (await other.batches.list()).data == []


async def test_lists_are_read_page_by_page(house: House) -> None:
    client = house.client()
    files, batches = [], []
    for i in range(5):
        house.now_s += 1
        batch = await created(client, [chat_line(i)])
        files.append(batch.input_file_id)
        batches.append(batch.id)
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == files
    assert [file.id async for file in client.files.list(limit=3)] == files[::-1]
    assert [batch.id async for batch in client.batches.list(limit=2)] == batches[::-1]
    assert (await client.files.list(purpose="batch_output")).data == []
    with pytest.raises(openai.BadRequestError, match="`after`"):
        await client.batches.list(after="batch_x")


async def test_a_file_expires_when_it_was_told_and_is_deleted(house: House) -> None:
    client = house.client()
    file = await client.files.create(
        file=("in.jsonl", jsonl([chat_line(0)])),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    house.now_s += 3601
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    house.store.care()
    assert house.store._store.keys("file-data/") == house.store._store.keys("files/") == []


async def test_pieces_of_an_upload_that_broke_off_are_deleted_later(house: House) -> None:
    file_id = (await house.client().files.create(file=("a", b"{}\n"), purpose="batch")).id
    [key] = house.store._store.keys("files/")
    house.store._store.delete(key)
    house.store.care()
    assert house.store._store.keys("file-data/") == [f"file-data/{file_id}.000000"]
    house.now_s += 3 * 3600
    house.store.care()
    assert house.store._store.keys("file-data/") == []


async def test_what_has_ended_long_ago_is_deleted(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0)])
    async with house.running():
        await ended(client, batch.id)
    house.now_s += bounds.BATCH_LIVES_S + 60
    house.store.care()
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve(batch.id)
    assert [house.store._store.keys(f"{folder}/") for folder in ("batches", "open", "ends", "batch-log")] == [[]] * 4


async def test_the_input_of_a_batch_that_has_not_ended_cannot_be_deleted(house: House) -> None:
    client = house.client()
    batch = await created(client, [chat_line(0)])
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    async with house.running():
        await ended(client, batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted


async def test_a_file_of_several_pieces_is_downloaded_whole(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafleet.cluster.batches.file_store.PIECE_BYTES", 1000)
    content = jsonl([chat_line(i) for i in range(40)])
    client = house.client()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (await client.files.content(file.id)).content == content
    await client.files.delete(file.id)
    assert house.store._store.keys("file-data/") == []


# -- bounds -----------------------------------------------------------------------------------------------------------


async def test_an_upload_is_refused_by_name(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.client()
    for purpose in ("fine-tune", "assistants"):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a", b"{}"), purpose=purpose)
    with pytest.raises(openai.BadRequestError, match="seconds"):
        await client.files.create(
            file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
        )
    with pytest.raises(openai.BadRequestError, match="0 bytes"):
        await client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="filename"):
        await client.files.create(file=("a" * 300, b"{}"), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="multipart/form-data") as unsupported:
        await client.post("/files", cast_to=object, body={"purpose": "batch"})
    assert unsupported.value.status_code == 415
    monkeypatch.setattr(bounds, "MAX_FILE_BYTES", 1000)
    with pytest.raises(openai.BadRequestError, match="1001 bytes"):
        await client.files.create(file=("a", b"a" * 1001), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="more than") as too_large:
        await client.files.create(file=("a", b"a" * (1000 + bounds.MAX_FORM_BYTES)), purpose="batch")
    assert too_large.value.status_code == 413
    assert house.store._store.keys("file-data/") == []


async def test_a_tenant_has_bounded_files_and_batches(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = house.client(), house.client("umbrella")
    large = b"a" * (400 << 10)
    await client.files.create(file=("a", large), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="--batch-store-bytes"):
        await client.files.create(file=("b", large), purpose="batch")
    await other.files.create(file=("b", large), purpose="batch")
    monkeypatch.setattr(bounds, "MAX_FILES_OF_ONE", 1)
    with pytest.raises(openai.RateLimitError, match="1 files"):
        await client.files.create(file=("c", b"{}"), purpose="batch")
    monkeypatch.setattr(bounds, "MAX_FILES_OF_ONE", 10)
    monkeypatch.setattr(bounds, "MAX_OPEN_OF_ONE", 1)
    first = await created(client, [chat_line(0)])
    with pytest.raises(openai.RateLimitError, match="not ended"):
        await created(client, [chat_line(1)])
    await created(other, [chat_line(2)])
    async with house.running():
        await ended(client, first.id)
    monkeypatch.setattr(bounds, "MAX_BATCHES_OF_ONE", 1)
    house.now_s += 1
    second = await created(client, [chat_line(3)])
    assert [batch.id for batch in (await client.batches.list()).data] == [second.id]


async def test_a_batch_is_refused_by_name(house: House) -> None:
    client = house.client()
    for options, match in (
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            await created(client, [chat_line(0)], **options)


async def test_without_a_store_the_routes_name_the_option(house: House) -> None:
    house.api = build_api(lambda: house.front, batch_routes())
    client = house.client()
    for call in (client.files.list(), client.batches.list(), client.files.create(file=b"{}", purpose="batch")):
        with pytest.raises(openai.PermissionDeniedError, match="--batch-store"):
            await call


@pytest.mark.parametrize(
    "raw", [b"{", b'{"response": null}', b'{"response": {"body": {"usage": null}}}', b'{"response": {"body": []}}']
)
def test_an_answer_without_usage_counts_nothing(raw: bytes) -> None:
    assert usage_of(raw).input_tokens == 0

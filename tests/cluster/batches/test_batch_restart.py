"""A batch whose process ends, or whose store is away, goes on, and each of its lines is answered exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from lorafleet.cluster.batches.batch_log import LogEntry
from lorafleet.cluster.batches.batch_records import BatchStage
from lorafleet.cluster.batches.line_post import LinePost, LineReply
from lorafleet.cluster.batches.log_journal import LogJournal, TurnLost
from lorafleet.protocol.errors import StoreError
from tests.cluster.batches.conftest import House, chat_line, created, ended, ids, read_lines, until


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

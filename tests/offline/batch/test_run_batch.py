"""A batch is answered exactly once, wherever a run ends and whatever the server does."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorafleet.offline.batch import batch_journal
from lorafleet.offline.batch.answering import AnswerRecord, BatchProgress, Pace, answer_lines
from lorafleet.offline.batch.batch_answers import LineAnswer
from lorafleet.offline.batch.batch_input import BatchContents, BatchLine
from lorafleet.offline.batch.batch_places import FileOutput, S3Output, opened_input
from lorafleet.offline.batch.line_sender import LineSender, SenderOptions
from lorafleet.offline.batch.run_batch import BatchRun
from lorafleet.protocol.errors import ConfigError, LorafleetError
from memory_s3 import MemoryS3

Reply = Callable[[dict[str, Any]], httpx.Response]


def echo(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"id": "cmpl-1", "prompt": body["prompt"]}, headers={"x-request-id": "r"})


def line(number: int, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"é{number}"} | body
    return {"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions", "body": body}


def write_input(path: Path, count: int = 20) -> Path:
    path.write_text("".join(json.dumps(line(i)) + "\n" for i in range(count)))
    return path


class Batch:
    """A batch in a folder, and the requests that its runs have sent."""

    def __init__(self, folder: Path, *, has_errors: bool = False) -> None:
        self.input = write_input(folder / "in.jsonl")
        self.answers: Any = FileOutput(folder / "out.jsonl")
        self.errors: Any = FileOutput(folder / "err.jsonl") if has_errors else None
        self.out, self.err = folder / "out.jsonl", folder / "err.jsonl"
        self.sent: list[str] = []
        self.waits: list[float] = []

    def run(self, reply: Reply = echo, **options: Any) -> BatchProgress | None:
        """Returns the progress at the end, or None if the batch was complete."""

        async def wait(seconds: float) -> None:
            self.waits.append(seconds)

        def handle(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content)
            self.sent.append(body["prompt"])
            return reply(body)

        def make_sender() -> LineSender:
            given = SenderOptions(**{"url": "http://server/v1/", "concurrency": 4} | options)
            return LineSender(given, sleep=wait, transport=httpx.MockTransport(handle))

        with self.input.open("rb") as file:
            run = BatchRun(file, self.answers, self.errors, 4)
            return None if run.was_completed() else run.run(make_sender, lambda _: None)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def ids(*paths: Path) -> Counter[str]:
    return Counter(answer["custom_id"] for path in paths for answer in read(path))


ALL = Counter(f"id {i}" for i in range(20))


def test_each_line_gets_its_answer_in_openais_format(tmp_path: Path):
    batch = Batch(tmp_path)
    assert batch.run() == BatchProgress(20, 20, 0)
    by_id = {answer["custom_id"]: answer for answer in read(batch.out)}
    assert by_id.keys() == ALL.keys()
    answer = by_id["id 7"]
    assert answer["id"].startswith("batch_req_") and answer["error"] is None
    body = {"id": "cmpl-1", "prompt": "é7"}
    assert answer["response"] == {"status_code": 200, "request_id": "r", "body": body}
    assert len({answer["id"] for answer in by_id.values()}) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert batch.run() is None
    assert len(batch.sent) == 20


def test_a_run_goes_on_from_wherever_the_journal_was_cut(tmp_path: Path):
    """A process that is killed leaves the first bytes of what it has written, be they how many they may."""
    whole = Batch(tmp_path)
    whole.run()
    content = whole.out.read_bytes()
    whole.out.unlink()
    for size in [*range(0, len(content), 37), *range(30), len(content) - 1, len(content)]:
        batch = Batch(tmp_path)
        batch.answers.journal.write_bytes(content[:size])
        assert batch.run() == BatchProgress(20, 20, 0)
        assert ids(batch.out) == ALL
        assert len(batch.sent) == 20 - content[:size].count(b"\n")
        batch.out.unlink()


def test_what_a_crash_of_the_machine_left_of_the_last_group_is_answered_again(tmp_path: Path):
    batch = Batch(tmp_path)
    batch.run()
    lines = batch.out.read_bytes().splitlines(keepends=True)
    batch.out.unlink()
    batch.answers.journal.write_bytes(b"".join([*lines[:9], b"\0" * 50 + b"\n", *lines[10:12], b"\0\0"]))
    batch.run()
    assert ids(batch.out) == ALL


def test_a_run_that_ends_between_two_publications_is_completed(tmp_path: Path):
    batch = Batch(tmp_path, has_errors=True)
    fails = lambda body: echo(body) if body["prompt"] != "é3" else httpx.Response(400, json={"error": {}})  # noqa: E731
    batch.run(fails)
    batch.out.rename(batch.answers.journal)  # as if it had not been published
    num_sent = len(batch.sent)
    assert batch.run() == BatchProgress(20, 20, 1)
    assert len(batch.sent) == num_sent
    assert ids(batch.out, batch.err) == ALL
    assert ids(batch.err) == {"id 3": 1}
    assert batch.run() is None


def test_bad_lines_and_failed_ones_are_error_lines_and_the_rest_goes_on(tmp_path: Path):
    batch = Batch(tmp_path, has_errors=True)
    batch.input.write_text(batch.input.read_text() + "{\n" + json.dumps(line(21) | {"method": "GET"}) + "\n")

    def reply(body: dict[str, Any]) -> httpx.Response:
        if body["prompt"] == "é1":
            return httpx.Response(404, json={"error": {"message": "no such model"}})
        return httpx.Response(500, text="<html>") if body["prompt"] == "é2" else echo(body)

    assert batch.run(reply) == BatchProgress(22, 22, 4)
    failed = {answer["custom_id"]: answer for answer in read(batch.err)}
    assert failed.keys() == {None, "id 21", "id 1", "id 2"}
    assert "line 21" in failed[None]["error"]["message"]
    assert failed["id 21"]["error"]["code"] == "invalid_line" and failed["id 21"]["response"] is None
    assert failed["id 1"]["error"] is None and failed["id 1"]["response"]["status_code"] == 404
    assert failed["id 2"]["error"]["code"] == "invalid_response"
    assert ids(batch.out) == ALL - Counter(["id 1", "id 2"])
    together = Batch(tmp_path)
    together.out.unlink()
    together.run(reply)
    assert ids(together.out) == ALL


def test_a_busy_server_gets_the_line_again_after_the_time_it_names(tmp_path: Path):
    batch, refused = Batch(tmp_path), Counter[str]()

    def reply(body: dict[str, Any]) -> httpx.Response:
        refused[body["prompt"]] += 1
        if refused[body["prompt"]] == 1:
            return httpx.Response(429, headers={"retry-after": "7"}, json={})
        if refused[body["prompt"]] == 2:
            raise httpx.ReadError("reset")
        return echo(body)

    assert batch.run(reply) == BatchProgress(20, 20, 0)
    assert set(refused.values()) == {3}
    assert sum(7.0 <= wait <= 7.7 for wait in batch.waits) == 20
    assert ids(batch.out) == ALL


def test_a_line_that_stays_refused_gets_the_refusal_as_its_answer(tmp_path: Path):
    batch = Batch(tmp_path)
    busy = httpx.Response(503, headers={"retry-after": "30"}, json={"error": {"code": "overloaded"}})
    done = batch.run(lambda body: busy if body["prompt"] == "é5" else echo(body), retry_s=20.0)
    assert done == BatchProgress(20, 20, 1)
    [failed] = [answer for answer in read(batch.out) if answer["response"]["status_code"] != 200]
    assert failed["response"]["body"] == {"error": {"code": "overloaded"}}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda _: httpx.Response(401, json={}), "API key"),
        (lambda _: (_ for _ in ()).throw(httpx.ConnectError("refused")), "did not answer"),
    ],
)
def test_a_server_that_answers_nothing_ends_the_run_and_a_later_one_goes_on(tmp_path: Path, reply: Reply, words: str):
    batch = Batch(tmp_path)
    done: list[str] = []

    def some(body: dict[str, Any]) -> httpx.Response:
        done.append(body["prompt"])
        return echo(body) if len(done) <= 6 else reply(body)

    with pytest.raises(LorafleetError, match=words):
        batch.run(some, retry_s=0.0)
    assert not batch.out.exists()
    assert batch.run() == BatchProgress(20, 20, 0)
    assert ids(batch.out) == ALL


def test_no_more_lines_are_sent_at_a_time_than_allowed_and_a_refusal_lowers_the_number(tmp_path: Path):
    batch = Batch(tmp_path)
    write_input(batch.input, 200)
    assert batch.run(concurrency=1) == BatchProgress(200, 200, 0)
    assert batch.sent == [f"é{i}" for i in range(200)]  # one at a time


@pytest.mark.parametrize(("most_bytes", "expected"), [(1, 1), (250, 2), (10_000, 4)])
async def test_the_lines_that_are_sent_at_a_time_have_a_bound_of_bytes(most_bytes: int, expected: int):
    class Sender:
        now = most = 0

        async def answer(self, line: BatchLine) -> LineAnswer:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            self.now -= 1
            return LineAnswer(line, 200)

        async def close(self) -> None:
            pass

    class Journal:
        name, answered, num_failed = "memory", set[int](), 0

        def append(self, lines: Sequence[bytes]) -> None:
            pass

    sender: Any = Sender()
    lines = [BatchLine(i, str(i), "/v1/completions", b"x" * 100) for i in range(1, 13)]
    record = AnswerRecord(BatchContents("0" * 12, frozenset(range(1, 13))), [Journal()])
    await answer_lines(sender, iter(lines), record, Pace(4, most_bytes=most_bytes), lambda _: None)
    assert (record.now.num_answered, sender.most) == (12, expected)


def test_an_output_of_another_input_is_not_touched(tmp_path: Path):
    batch = Batch(tmp_path)
    batch.run()
    before = batch.out.read_bytes()
    write_input(batch.input, 19)
    with pytest.raises(ConfigError, match="not an output of this input"):
        batch.run()
    batch.out.rename(batch.answers.journal)
    with pytest.raises(ConfigError, match="not an output of this input"):
        batch.run()
    assert batch.answers.journal.read_bytes() == before
    batch.answers.journal.write_bytes(b"my letters\n")
    with pytest.raises(ConfigError, match="something else"):
        batch.run()
    assert batch.answers.journal.read_bytes() == b"my letters\n"


def test_two_runs_at_a_time_are_refused(tmp_path: Path):
    batch = Batch(tmp_path)
    inner: list[str] = []

    def reply(body: dict[str, Any]) -> httpx.Response:
        if not inner:
            inner.append("")
            with pytest.raises(ConfigError, match="another run"):
                batch_journal.BatchJournal(batch.answers.journal, "0" * 12)
        return echo(body)

    batch.run(reply)
    assert inner


def test_a_full_disk_ends_the_run_without_a_torn_line(tmp_path: Path, monkeypatch):
    batch, write, num_written = Batch(tmp_path), os.write, 0

    def fill(descriptor: int, content: Any) -> int:
        nonlocal num_written
        num_written += 1
        if num_written == 4:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:50])

    monkeypatch.setattr(batch_journal.os, "write", fill)
    with pytest.raises(LorafleetError, match="No space left"):
        batch.run()
    monkeypatch.undo()
    assert batch.answers.journal.read_bytes()[-1:] in (b"", b"\n")
    batch.run()
    assert ids(batch.out) == ALL


def test_an_input_that_changes_is_not_published(tmp_path: Path):
    batch = Batch(tmp_path)

    def reply(body: dict[str, Any]) -> httpx.Response:
        if body["prompt"] == "é9":
            with batch.input.open("a") as file:
                file.write("x")
        return echo(body)

    with pytest.raises(ConfigError, match="changed"):
        batch.run(reply)
    assert not batch.out.exists()


def test_s3_gets_each_output_as_a_whole_and_a_lost_answer_does_no_harm(tmp_path: Path):
    batch, s3 = Batch(tmp_path), MemoryS3()
    s3.objects["in.jsonl"] = batch.input.read_bytes(), {}
    batch.answers = S3Output("s3://b/x/out.jsonl", s3, tmp_path)
    assert batch.answers.journal == tmp_path / "out.jsonl.partial"
    copy = tmp_path / "copy"
    with opened_input("s3://b/in.jsonl", copy, lambda: s3) as file:
        assert file.read() == batch.input.read_bytes()
    assert not copy.exists()
    uploads: list[str] = []

    def fault() -> None:
        if "x/out.jsonl" in s3.objects and not uploads:
            uploads.append("lost")
            raise OSError("connection lost")

    s3.fault = fault
    with pytest.raises(LorafleetError, match="connection lost"):
        batch.run()
    assert batch.answers.journal.exists()
    assert batch.run() is None  # the object is there, and only the answer was lost
    assert not batch.answers.journal.exists()
    content, metadata = s3.objects["x/out.jsonl"]
    assert Counter(json.loads(text)["custom_id"] for text in content.splitlines()) == ALL
    assert len(metadata["lorafleet-batch"]) == 12
    s3.objects["x/out.jsonl"] = b"other", {}
    with pytest.raises(ConfigError, match="not an output of this input"):
        batch.run()

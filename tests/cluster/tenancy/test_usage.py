"""What is metered adds up to what was answered, whatever became of a request, and is there before its answer is."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lorafleet.api.access.usage import TenantUsage
from lorafleet.cluster.cli.cli import app
from lorafleet.cluster.tenancy.line_file import LineFile
from lorafleet.cluster.tenancy.usage_log import UsageLog
from lorafleet.cluster.tenancy.usage_sums import read_usage, summed
from lorafleet.protocol.errors import ConfigError, InvalidRequest, StoreError
from tests.cluster.tenancy.house import PROMPT, House


def usage_in(answer: httpx.Response) -> dict[str, int]:
    """Of a whole answer, or the last chunk of a stream."""
    assert answer.status_code == 200, answer.text
    whole = answer.text
    if whole.startswith("data: "):
        whole = next(line for line in reversed(whole.splitlines()) if '"usage":{' in line).removeprefix("data: ")
    usage = json.loads(whole)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"], "cached": cached}


def metered(house: House, tenant: str) -> dict[str, int]:
    one = summed(house.folder / "usage", ["tenant"])[tenant,]
    return {"prompt": one.prompt_tokens, "completion": one.completion_tokens, "cached": one.cached_tokens}


async def test_metering_adds_up_to_the_tokens_served(house: House, fleet: Callable[[str], Any]) -> None:
    adapters, streamed = fleet("llama3").adapters, {"stream": True, "stream_options": {"include_usage": True}}
    answered = Counter[str]()
    async with house.open():
        versions = {}
        for name in ("qv", "regex"):
            pushed = (await house.push("acme", name, adapters[name])).json()
            versions[name] = pushed["versions"][0]["digest"]
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        for answer in [
            await house.complete("acme", "base"),
            await house.complete("acme", "base"),  # its prompt is cached now
            await house.complete("acme", "qv", n=3, temperature=1.0),
            await house.complete("acme", "regex", **streamed, n=2),
            await house.complete("acme", "qv+regex", lora_weights=[0.5, 2]),
            await house.complete("acme", "qv", prompt=[PROMPT, PROMPT[:9]], stop=["a"]),
            await house.complete("acme", "qv", echo=True, max_tokens=0, logprobs=1),
            await house.ask("acme", "POST", "/v1/chat/completions", {"model": "qv", **chat}),
            await house.ask("acme", "POST", "/v1/chat/completions", {"model": "qv", **chat, **streamed}),
        ]:
            answered.update(usage_in(answer))
        sglang = {"text": "hello", "lora_path": "regex", "sampling_params": {"max_new_tokens": 3}}
        meta = (await house.ask("acme", "POST", "/generate", sglang)).json()["meta_info"]
        answered.update({kind: meta[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")})
        embedded = await house.ask("acme", "POST", "/v1/embeddings", {"model": "qv", "input": ["one", "two"]})
        answered["prompt"] += embedded.json()["usage"]["prompt_tokens"]
        said = {"model": "regex", "input": "hello", "max_output_tokens": 16}
        response = (await house.ask("acme", "POST", "/v1/responses", said)).json()["usage"]
        answered.update(prompt=response["input_tokens"], completion=response["output_tokens"])
        answered.update(cached=response["input_tokens_details"]["cached_tokens"])
        assert answered["cached"] > 0
        assert (await house.complete("acme", "nobody")).status_code == 404
        assert (await house.complete("acme", "qv", max_tokens=10**6)).status_code == 400
        assert metered(house, "acme") == dict(answered)
        by = summed(house.folder / "usage", ["key", "adapter", "digest"])
        assert {(key, adapter) for key, adapter, _ in by} == {
            ("acme", name) for name in ("", "~acme/qv", "~acme/regex", "~acme/qv+~acme/regex")
        }
        assert {d for _, adapter, d in by if adapter == "~acme/qv"} == {versions["qv"]}
        assert by["acme", "", ""].sequences == 2
        shown = (await house.ask("acme", "GET", "/metrics")).text
        for kind, count in answered.items():
            assert f'lorafleet_tenant_tokens_total{{kind="{kind}",replica="",tenant="acme"}} {float(count)}' in shown


async def test_what_a_client_leaves_behind_is_metered_as_far_as_it_went(house: House) -> None:
    async with house.open():
        held = house.hold(after=20)
        left = asyncio.create_task(house.complete("acme", "base", max_tokens=100, stream=True))
        await held.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        [one] = read_usage(house.folder / "usage")
        assert (one.ended, one.prompt_tokens, one.completion_tokens) == ("abort", len(PROMPT), 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_line_is_written_before_the_end_of_the_answer_is_sent(house: House, stream: bool) -> None:
    """So that a replica that is killed has metered all that it has answered."""
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    written: list[int] = []
    async with house.open():
        headers = [(b"authorization", f"Bearer {house.keys['acme']}".encode()), (b"content-type", b"application/json")]
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        asked = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
        forever = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if (message := next(asked, None)) is None:
                await forever.wait()
            return message or {}

        async def send(message: Any) -> None:
            if b'"finish_reason":"length"' in message.get("body", b""):
                [log] = (house.folder / "usage").iterdir()
                written.extend(json.loads(line)["completion_tokens"] for line in log.read_text().splitlines())

        await house.api({**scope, "headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    assert written == [4]


async def test_a_prompt_that_was_refused_costs_nothing(house: House) -> None:
    async with house.open():
        refused = await house.complete("acme", "base", max_tokens=1, prompt=[PROMPT] * 3, timeout=0)
        assert refused.status_code == 400  # an unknown field
        house.engine.fail("killed")
        assert (await house.complete("acme", "base")).status_code == 503
    [one] = read_usage(house.folder / "usage")
    assert (one.ended, one.prompt_tokens, one.completion_tokens) == ("error", 0, 0)


def test_what_cannot_be_written_is_kept_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write, room = UsageLog(tmp_path, "r"), os.write, [10]

    def full(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, room[0] = min(room[0], len(data)), 0
        return write(file, data[:taken])

    monkeypatch.setattr(os, "write", full)
    for number in (1, 2):
        log.add(TenantUsage(number, "r", completion_tokens=number))
    waiting = {s.name: s.value for metric in log.collect() for s in metric.samples}["lorafleet_usage_unwritten_bytes"]
    assert waiting == log.lines.unwritten_bytes > 0
    assert list(read_usage(tmp_path)) == []
    room[0] = 10**6
    log.lines.sync()
    assert [one.completion_tokens for one in read_usage(tmp_path)] == [1, 2] and not log.lines.unwritten_bytes
    log.lines.close()


class _Disk:
    """Stands in for os.write: there is room for so many bytes; counts calls and the bytes that they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.num_calls, self.num_offered = room, 0, 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        self.num_calls, self.num_offered = self.num_calls + 1, self.num_offered + len(data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return self._write(file, data[:taken])


def test_on_a_full_disk_a_line_costs_the_same_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, disk = UsageLog(tmp_path, "r"), _Disk(monkeypatch, room=0)
    for number in range(5000):
        log.add(TenantUsage(number, "r", completion_tokens=number))
    waiting = log.lines.unwritten_bytes
    assert disk.num_offered < 1000, "no line is offered to the disk with all that wait before it"
    disk.room = waiting // 3  # in the middle of a line
    log.lines.sync()
    assert 0 < log.lines.unwritten_bytes < waiting
    disk.room = 10**9
    log.lines.sync()
    assert disk.num_offered < 4 * waiting and not log.lines.unwritten_bytes
    assert [one.completion_tokens for one in read_usage(tmp_path)] == list(range(5000))
    log.add(TenantUsage(5000, "r"))
    assert not log.lines.unwritten_bytes, "with room every line is written at once"
    log.lines.close()


async def test_while_too_much_is_unwritten_nothing_more_is_generated_and_nothing_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.open():
        assert house.tenancy.usage is not None
        house.tenancy.usage._max_unwritten_bytes = 300
        disk = _Disk(monkeypatch, room=0)
        answered = 0
        while (answer := await house.complete("acme", "base")).status_code == 200:
            answered += 1
        disk.room = 10**9
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert "bytes are waiting, and at most 300 may wait" in answer.json()["error"]["message"]
        assert (await house.ask("acme", "POST", "/tokenize", {"prompt": "hi"})).status_code == 200
        shown = (await house.ask("operator", "GET", "/metrics")).text
        assert 'lorafleet_usage_refused_total{replica=""} 1.0' in shown
        house.tenancy.usage.lines.sync()
        assert (await house.complete("acme", "base")).status_code == 200, "by itself, once there is room"
        assert summed(house.folder / "usage", ["tenant"])["acme",].sequences == answered + 1 > 1


async def test_a_line_is_short_however_long_an_id_the_client_chose(house: House) -> None:
    async with house.open():
        headers = {"authorization": f"Bearer {house.keys['acme']}", "x-request-id": "x" * 30_000}
        body = {"model": "base", "prompt": PROMPT, "max_tokens": 1}
        answers = [await house.http.post("/v1/completions", headers=headers, json=body) for _ in range(2)]
    lines = [line for path in (house.folder / "usage").iterdir() for line in path.read_bytes().splitlines()]
    assert len(lines) == sum(answer.status_code == 200 for answer in answers)
    assert all(len(line) < 1000 for line in lines) and len(set(lines)) == len(lines)


def test_a_line_cut_off_by_a_crash_is_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, "r")
    for number in (1, 2):
        log.add(TenantUsage(number, "r", tenant="acme", completion_tokens=number))
    log.lines.close()
    [path] = tmp_path.iterdir()
    with path.open("ab") as lines:
        lines.write(b'{"at_s": 3, "requ')
    assert summed(tmp_path, ["tenant"])["acme",].completion_tokens == 3
    path.write_bytes(path.read_bytes().replace(b'"at_s":2', b'"at_s:2'))
    with pytest.raises(StoreError, match="line 2"):
        summed(tmp_path, ["tenant"])


def test_a_large_file_is_followed_by_another(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, "r", max_file_bytes=300)
    for number in range(20):
        log.add(TenantUsage(number, "r", completion_tokens=number))
        if number % 7 == 0:
            log.lines.sync()
    log.lines.close()
    assert [one.completion_tokens for one in read_usage(tmp_path)] == list(range(20))
    assert len(list(tmp_path.iterdir())) > 2


def test_each_incarnation_has_a_file_of_its_own(tmp_path: Path) -> None:
    logs = [LineFile(tmp_path, "usage-r") for _ in range(3)]
    assert len(list(tmp_path.iterdir())) == 3
    for log in logs:
        log.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        LineFile(tmp_path / "file" / "usage", "r")


def test_the_command_sums_by_what_is_named_and_in_a_span_of_time(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, "r")
    for day, tenant, adapter in ((1, "acme", "~acme/a"), (2, "acme", "~acme/b"), (3, "rival", "~rival/a")):
        log.add(TenantUsage(day * 86400.0, "r", tenant, "k", adapter, "d", 10 * day, 0, day))
    log.lines.close()

    def usage(*options: str) -> list[str]:
        result = CliRunner().invoke(app, ["usage", str(tmp_path), *options])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    header = "sequences,prompt_tokens,cached_tokens,completion_tokens"
    assert usage() == [f"tenant,{header}", "acme,2,30,0,3", "rival,1,30,0,3"]
    assert usage("--by", "tenant,adapter", "--since", "1970-01-03")[1:] == [
        "acme,~acme/b,1,20,0,2",
        "rival,~rival/a,1,30,0,3",
    ]
    assert usage("--by", "", "--until", "1970-01-03T00:00:00+00:00")[1:] == ["1,10,0,1"]
    with pytest.raises(InvalidRequest, match="no field 'model'"):
        summed(tmp_path, ["model"])

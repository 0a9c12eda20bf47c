"""Uploads and batches beyond a bound are refused with an error that names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_quota import BatchQuota
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.batches.line_post import LinePost, LineReply
from tests.cluster.batches.conftest import MAX_BYTES, House, chat_line, created, ended, jsonl


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


CHARSETS = ["idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "utf-7", "utf-16", "zlib", "none"]


async def upload(house: House, content_type: str, filename: bytes) -> httpx.Response:
    lines = [
        b"--b",
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b',
        b'Content-Disposition: form-data; name="file"; filename="' + filename + b'"\r\n\r\n{}\r\n--b--\r\n',
    ]
    headers = {"content-type": content_type, "authorization": "Bearer key of acme"}
    transport = httpx.ASGITransport(house.api)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as client:
        return await client.post("/files", content=b"\r\n".join(lines), headers=headers)


@pytest.mark.parametrize("charset", CHARSETS)
async def test_a_charset_of_an_upload_has_no_effect(house: House, charset: str) -> None:
    answer = await upload(house, f"multipart/form-data; charset={charset}; boundary=b", "é\\ud800.jsonl".encode()[1:])
    assert answer.status_code == 400  # The name is not valid, in whatever charset.
    answer = await upload(house, f'multipart/form-data; boundary="b"; charset={charset}', "é+AGE-xn--a.jsonl".encode())
    assert (answer.status_code, answer.json()["filename"]) == (200, "é+AGE-xn--a.jsonl"), answer.text


@pytest.mark.parametrize("filename", [b"../../etc/x", b"a\x1b[31m", b"a\\b", b"..", "a\u202eb".encode(), b"a\x00"])
async def test_a_filename_that_is_a_path_or_acts_on_terminals_is_refused(house: House, filename: bytes) -> None:
    answer = await upload(house, "multipart/form-data; boundary=b", filename)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (b"\x00" in filename or error["param"] == "file"), answer.text
    assert error["message"].isprintable()


@pytest.mark.parametrize("given", ["", "; boundary=", "; boundary=" + "b" * 71, '; boundary="b', "; charset=b"])
async def test_an_upload_without_a_boundary_is_refused(house: House, given: str) -> None:
    answer = await upload(house, f"multipart/form-data{given}", b"a")
    assert answer.status_code == 400 and "boundary" in answer.json()["error"]["message"]


async def test_output_files_count_as_files_of_their_tenant(house: House) -> None:
    """One input may be used by many batches, whose outputs are stored as well."""
    client, lines, hold = house.client(), [chat_line(number) for number in range(8)], asyncio.Event()

    async def post(line: LinePost) -> LineReply:
        if b"number 6" in line.body:
            await hold.wait()
        return await house.answerer.answer(line)

    house.store.quota = BatchQuota(house.store.files, lambda: 2 * (len(jsonl(lines)) + 1000))
    batch = await created(client, lines)
    async with house.running(house.runner(post, most_lines=1)):
        batch = await ended(client, batch.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "output_too_large")
    assert 0 < batch.request_counts.completed <= 6 and batch.output_file_id is not None
    house.store.quota = BatchQuota(house.store.files, lambda: 2)
    with pytest.raises(openai.RateLimitError, match="leave no room for the output of a batch"):
        await client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )


async def test_an_upload_beyond_the_quota_is_not_read(house: House) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"authorization": "Bearer key of acme", "content-type": "multipart/form-data; boundary=x"}
    headers["content-length"] = str(MAX_BYTES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(house.api), base_url="http://localhost") as http:
        refused = await http.post("/v1/files", content=never(), headers=headers)
    assert refused.status_code == 429 and "--batch-store-bytes" in refused.text


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

"""Files and batches are listed and deleted: by their tenant only, and by themselves after a time."""

from __future__ import annotations

import openai
import pytest

from lorafleet.cluster.batches import batch_bounds as bounds
from tests.cluster.batches.conftest import House, chat_line, created, ended, jsonl


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

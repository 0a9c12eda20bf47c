"""An adapter's files become a tar in small pieces, and only if they are the ones that were registered."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from starlette.types import Message

from lorafleet.cluster.admin.download_api import TarStream
from lorafleet.cluster.admin.download_tar import CHUNK_BYTES, AdapterTar, open_packed
from lorafleet.protocol.adapter_formats.adapter_files import OpenFile, folder_digest
from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed, AdapterMissing

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": os.urandom(2 * CHUNK_BYTES + 7),
    "chat_template.jinja": bytes(512),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    for name, content in {**FILES, "optimizer.pt": b"not an adapter's"}.items():
        (made / name).write_bytes(content)
    return made


def read_all(packed: AdapterTar) -> list[bytes]:
    parts = []
    while part := packed.read():
        parts.append(part)
    return parts


def files_of(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]  # all are files


def test_the_tar_has_the_files_of_the_digest_in_pieces_even_if_the_folder_goes(folder: Path) -> None:
    packed = open_packed(folder, folder_digest(folder))
    shutil.rmtree(folder)
    parts = read_all(packed)
    assert max(map(len, parts)) == CHUNK_BYTES and sum(map(len, parts)) == packed.num_bytes
    assert files_of(b"".join(parts)) == FILES
    packed.close()
    assert packed.read() == b""


def test_other_bytes_than_those_registered_are_not_opened(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterChanged, match="digest 00000000"):
        open_packed(folder, "0" * 64)
    with pytest.raises(AdapterMissing):
        open_packed(tmp_path, "0" * 64)


def test_a_file_that_becomes_shorter_breaks_the_download_off(folder: Path) -> None:
    packed = open_packed(folder, folder_digest(folder))
    packed.read()
    os.truncate(folder / "adapter_config.json", 1)
    with pytest.raises(AdapterMalformed, match=r"adapter_config\.json is truncated"):
        read_all(packed)
    packed.close()


def test_a_file_over_8_gib_fits_in_one_header(tmp_path: Path) -> None:
    path, size = tmp_path / "adapter_model.safetensors", 9 << 30
    path.touch()
    os.truncate(path, size)
    with path.open("rb", buffering=0) as stream:
        packed = AdapterTar([OpenFile(path.name, stream, os.fstat(stream.fileno()))])
        assert tarfile.TarInfo.frombuf(packed.read(), "utf-8", "strict").size == size
        assert packed.num_bytes == 512 + size + 1024
        packed.close()


async def test_a_client_that_takes_nothing_is_sent_nothing_more_and_one_that_leaves_closes_the_files(
    folder: Path,
) -> None:
    packed = open_packed(folder, folder_digest(folder))
    num_read = 0
    blocked, left = asyncio.Event(), asyncio.Event()

    async def read() -> bytes:
        nonlocal num_read
        num_read += 1
        return packed.read()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    answering = asyncio.create_task(TarStream(packed, read, {})({}, receive, send))
    await blocked.wait()
    assert num_read == 1
    left.set()
    await answering
    assert packed.read() == b"" and num_read == 1

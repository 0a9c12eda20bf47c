"""A download's tar is unpacked as it comes, and only to an adapter's own files, whatever the tar says."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet.client.client_errors import DownloadError
from lorafleet.client.unpacking import Unpacker

FILES = {"adapter_config.json": b"{}", "chat_template.jinja": b"", "adapter_model.safetensors": bytes(range(256)) * 9}


def tar_of(files: dict[str, bytes], **fields: object) -> bytes:
    """A tar as the server sends it; `fields` are set in each header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(data: bytes, folder: Path, num_bytes: int = 1 << 20) -> None:
    """Gives the unpacker so many bytes at a time."""
    folder.mkdir()
    unpacker = Unpacker(folder)
    try:
        for start in range(0, len(data), num_bytes):
            unpacker.write(data[start : start + num_bytes])
        unpacker.finish()
    finally:
        unpacker.close()


@pytest.mark.parametrize("num_bytes", [1, 511, 512, 513, 1 << 20])
def test_pieces_of_any_size_give_the_same_files(tmp_path: Path, num_bytes: int) -> None:
    unpack(tar_of(FILES), tmp_path / "new", num_bytes)
    assert {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()} == FILES


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a path that climbs": (lambda: tar_of({"../adapter_config.json": b"{}"}), "not a file of an adapter"),
    "an absolute path": (lambda: tar_of({"/etc/adapter_config.json": b"{}"}), "not a file of an adapter"),
    "a folder's file": (lambda: tar_of({"x/adapter_config.json": b"{}"}), "not a file of an adapter"),
    "code": (lambda: tar_of({"evil.py": b"{}"}), "'evil.py', which is not a file of an adapter"),
    "a long name": (lambda: tar_of({"a" * 5000: b"{}"}), "not a file of an adapter"),
    "a link": (
        lambda: tar_of({"adapter_config.json": b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "not a file of an adapter",
    ),
    "a device": (lambda: tar_of({"adapter_config.json": b""}, type=tarfile.CHRTYPE), "not a file of an adapter"),
    "a file twice": (lambda: tar_of({"adapter_config.json": b"{}"})[:1024] * 2, r"contains adapter_config\.json twice"),
    "a huge config": (
        lambda: _header("adapter_config.json", 1 << 40),
        r"adapter_config\.json has 1099511627776 bytes; it may have 0 to 1048576",
    ),
    "a negative size": (lambda: _header("adapter_config.json", 5)[:124] + b"\xff" * 388, "damaged"),
    "a flipped bit": (lambda: b"b" + tar_of(FILES)[1:], "damaged"),
    "no tar": (lambda: b"<html>" * 200, "damaged"),
    "half of it": (lambda: tar_of(FILES)[:2000], "ended early"),
    "nothing": (lambda: b"", "ended early"),
}


def _header(name: str, num_bytes: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = num_bytes
    return entry.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("lie", LIES)
def test_a_tar_that_lies_or_is_damaged_writes_nothing_outside_the_folder(tmp_path: Path, lie: str) -> None:
    data, words = LIES[lie]
    with pytest.raises(DownloadError, match=words) as refused:
        unpack(data(), tmp_path / "new")
    assert len(refused.value.message) < 300
    assert [path.name for path in tmp_path.iterdir()] == ["new"]

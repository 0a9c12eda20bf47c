"""Tests that an upload must be an uncompressed tar of an adapter's files, and that reading it costs no more than its
bytes."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lorafleet.client.packing import pack
from lorafleet.client.unpacking import Unpacker
from lorafleet.cluster.admin.download_tar import open_packed
from lorafleet.cluster.admin.upload_tar import unpack
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest, stored_files
from lorafleet.protocol.errors import AdapterMalformed

DRAFT = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": save({"a": np.zeros(2, np.float32)}),
}


def tar_of(fill: Callable[[tarfile.TarFile], object], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        fill(tar)
    return buffer.getvalue()


def put(tar: tarfile.TarFile, name: str, data: bytes = b"{}", **fields: object) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for field, value in fields.items():
        setattr(entry, field, value)
    tar.addfile(entry, io.BytesIO(data))


def both(tar: tarfile.TarFile) -> None:
    put(tar, "adapter_config.json", mtime=1.5)  # a time that takes a description of its own
    put(tar, "adapter_model.safetensors", b"weights")


def sparse_tar() -> bytes:
    """GNU's old sparse format: one header that stands for a terabyte of zeros."""
    header = bytearray(tarfile.TarInfo("adapter_config.json").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:398] = header[398:410] = b"00000000000\0"
    header[483:495] = tarfile.itn(1 << 40, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def test_a_draft_lora_goes_the_whole_way_and_is_part_of_the_digest(tmp_path: Path) -> None:
    """From a user's folder by an upload to the store, and by a download to another folder."""
    own, received, staged, target = (tmp_path / name for name in ("own", "received", "staged", "target"))
    for folder in (own, received, staged, target):
        folder.mkdir()
    plain = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    for name, content in plain.items():
        (own / name).write_bytes(content)
    without = folder_digest(own)
    (own / "draft").mkdir()
    for name, content in DRAFT.items():
        (own / "draft" / name).write_bytes(content)
    digest = folder_digest(own)
    assert digest != without

    packed = io.BytesIO()
    pack(own, packed)
    unpack(packed, received)
    assert stage(received, staged) == digest
    store = FolderStore(tmp_path / "store", "catalog_uri")
    store.put_files(digest, staged)
    unpacker = Unpacker(target)
    tar = open_packed(Path(store.files_uri(digest)), digest)
    while part := tar.read():
        unpacker.write(part)
    unpacker.finish()
    tar.close()
    assert folder_digest(target) == digest
    assert stored_files(target).keys() == stored_files(own).keys()


@pytest.mark.parametrize(
    ("nonsense", "cause"),
    [
        ({"adapter_config.json": b'{"x": 1}'}, "has the peft_type None"),
        ({"adapter_config.json": b"[]"}, "draft/adapter_config.json"),
        ({"adapter_model.safetensors": b""}, "is truncated"),
        ({"adapter_model.safetensors": b"x" * 1000}, "is not a safetensors file"),
        ({"adapter_model.safetensors": DRAFT["adapter_model.safetensors"] + bytes(1 << 20)}, "belong to no tensor"),
        ({"adapter_model.safetensors": save({})}, "has no tensors"),
    ],
)
def test_a_draft_that_cannot_be_one_is_rejected_before_anything_is_copied(
    tmp_path: Path, nonsense: dict[str, bytes], cause: str
) -> None:
    own, staged = tmp_path / "own", tmp_path / "staged"
    (own / "draft").mkdir(parents=True)
    staged.mkdir()
    (own / "adapter_config.json").write_bytes(b"{}")
    (own / "adapter_model.safetensors").write_bytes(b"weights")
    for name, content in (DRAFT | nonsense).items():
        (own / "draft" / name).write_bytes(content)
    with pytest.raises(AdapterMalformed, match=cause):
        stage(own, staged)
    assert not list(staged.iterdir())


def test_half_a_draft_lora_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "draft" / "adapter_config.json").write_bytes(b"{}")
    with pytest.raises(AdapterMalformed, match=r"draft is not a draft LoRA, since draft/adapter_model\.safetensors is"):
        folder_digest(tmp_path)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "no tar": lambda: b"x" * 2000,
    "nothing": lambda: b"",
    "compressed": lambda: gzip.compress(tar_of(both)),
    "a bomb, compressed": lambda: gzip.compress(bytes(50 << 20)),
    "a path that climbs": lambda: tar_of(lambda tar: put(tar, "../adapter_config.json")),
    "an absolute path": lambda: tar_of(lambda tar: put(tar, "/etc/adapter_config.json")),
    "a folder": lambda: tar_of(lambda tar: put(tar, "adapter_config.json", b"", type=tarfile.DIRTYPE)),
    "a symlink": lambda: tar_of(
        lambda tar: put(tar, "adapter_config.json", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    ),
    "a hard link": lambda: tar_of(
        lambda tar: put(tar, "adapter_config.json", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")
    ),
    "a device": lambda: tar_of(lambda tar: put(tar, "adapter_config.json", b"", type=tarfile.CHRTYPE)),
    "a FIFO": lambda: tar_of(lambda tar: put(tar, "adapter_config.json", b"", type=tarfile.FIFOTYPE)),
    "code": lambda: tar_of(lambda tar: put(tar, "evil.py")),
    "one file twice": lambda: tar_of(lambda tar: [put(tar, "adapter_config.json") for _ in range(2)]),
    "a terabyte of holes": sparse_tar,
    "holes by description": lambda: tar_of(
        lambda tar: put(
            tar, "adapter_config.json", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40)}
        )
    ),
    "a long description": lambda: tar_of(
        lambda tar: put(tar, "adapter_config.json", pax_headers={"comment": "x" * (32 << 20)})
    ),
    "a long name": lambda: tar_of(lambda tar: put(tar, "a" * (1 << 20)), tarfile.GNU_FORMAT),
    "a million entries": lambda: bytes(tarfile.TarInfo("adapter_config.json").tobuf()) * 1000,
    "a number that is none": lambda: tar_of(
        lambda tar: put(tar, "adapter_config.json", pax_headers={"GNU.sparse.size": "many", "size": "many"})
    ),
    "a sparse map of what is no number": lambda: tar_of(
        lambda tar: put(tar, "adapter_config.json", pax_headers={"GNU.sparse.map": "a,b", "GNU.sparse.size": "1"})
    ),
    "a name that is no text": lambda: tar_of(lambda tar: put(tar, "\udcff" * 90), tarfile.USTAR_FORMAT),
    "a negative size": lambda: tarfile.TarInfo("adapter_config.json").tobuf(tarfile.GNU_FORMAT)[:124] + b"\xff" * 388,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_upload_is_refused_and_costs_no_more_than_its_bytes(tmp_path: Path, case: str) -> None:
    packed = io.BytesIO(HOSTILE[case]())
    target = tmp_path / "unpacked"
    target.mkdir()
    tracemalloc.start()
    try:
        with pytest.raises(AdapterMalformed, match="upload") as refused:
            unpack(packed, target)
        assert len(refused.value.message.encode()) < 600 and str(tmp_path) not in refused.value.message
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert sum(file.stat().st_size for file in target.iterdir()) < 100
    assert [file.name for file in tmp_path.iterdir()] == ["unpacked"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_two_files_of_an_adapter_are_unpacked(tmp_path: Path, form: int) -> None:
    unpack(io.BytesIO(tar_of(both, form)), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"weights",
    }


def test_a_tar_is_read_no_further_than_its_entries_may_go(tmp_path: Path) -> None:
    packed = io.BytesIO(HOSTILE["a million entries"]())
    with pytest.raises(AdapterMalformed, match="more than 44 entries"):
        unpack(packed, tmp_path)
    assert packed.tell() < 48 * tarfile.BLOCKSIZE


def test_the_files_of_an_adapters_language_come_along(tmp_path: Path) -> None:
    def with_language(tar: tarfile.TarFile) -> None:
        both(tar)
        put(tar, "tokenizer.json")
        put(tar, "chat_template.jinja", b"{{ messages }}")

    unpack(io.BytesIO(tar_of(with_language)), tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"

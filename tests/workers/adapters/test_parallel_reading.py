"""Values read in several threads, whose digest is computed beside the checks: parallel_reading.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder, OpenFile, folder_digest
from lorafleet.protocol.adapter_formats.sealed_memory import SealedContent
from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.content_digest import KnownDigests, combined
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.parallel_reading import MIN_THREADS_FOR_PIECES, ParallelReader
from lorafleet.workers.adapters.reader import ReadAdapter, read_adapter
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.packed_adapter import pack
from tests.workers.conftest import base_of, make_base

PIECE_BYTES = 256
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def known() -> KnownDigests:
    return KnownDigests()


@pytest.fixture(params=[1, MIN_THREADS_FOR_PIECES], ids=["one thread", "pieces are hashed"])
def reader(request: pytest.FixtureRequest, known: KnownDigests) -> Iterator[ParallelReader]:
    made = ParallelReader(request.param, PIECE_BYTES, known)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of(make_base("llama"))


def read(path: Path, base: Base, reader: ParallelReader | None, expected: str = "") -> ReadAdapter:
    return read_adapter(
        path, base=base, max_rank=64, dtype=torch.float32, name="sql", expected_digest=expected, reader=reader
    )


def test_memory_is_read_like_the_files_without_a_copy(adapter: Any, base: Base, reader: ParallelReader) -> None:
    weights = (adapter.path / WEIGHTS).read_bytes()
    content = SealedContent((adapter.path / "adapter_config.json").read_bytes(), memoryview(bytearray(weights)))
    files = read(adapter.path, base, reader)
    for use in (None, reader):
        found = read_adapter(
            content, base=base, max_rank=64, dtype=torch.float32, name="sql", expected_digest="d", reader=use
        )
        assert found.digest == "d", "whoever sealed the memory has computed it"
        for module, form in files.forms.linears.items():
            low_rank = found.forms.linears[module].low_rank
            assert form.low_rank is not None and low_rank is not None
            assert torch.equal(low_rank.a_RD, form.low_rank.a_RD) and torch.equal(low_rank.b_OR, form.low_rank.b_OR)
        one = next(iter(found.forms.linears.values())).low_rank
        assert one is not None
        offset = one.a_RD.data_ptr() - torch.frombuffer(content.weights, dtype=torch.uint8).data_ptr()
        assert 0 < offset < len(weights)


def test_faults_in_memory_are_found(adapter: Any, base: Base, reader: ParallelReader) -> None:
    config = (adapter.path / "adapter_config.json").read_bytes()
    weights = bytearray((adapter.path / WEIGHTS).read_bytes())
    for fault in (weights[:-4], weights[:4], weights[:-4] + b"\xff\xff\xff\x7f"):
        content = SealedContent(config, memoryview(fault))
        with pytest.raises(AdapterMalformed):
            read_adapter(content, base=base, max_rank=64, dtype=torch.float32, name="sql", reader=reader)


def overwrite_end(path: Path, data: bytes) -> None:
    """Overwrites the file's last bytes in place, and sets its old modification time again."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-len(data), os.SEEK_END)
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_threads_read_the_same_adapter(adapter: Any, base: Base, reader: ParallelReader) -> None:
    alone = read(adapter.path, base, None)
    for _ in range(3):
        found = read(adapter.path, base, reader)
        assert found.digest == alone.digest == folder_digest(adapter.path)
        for module, form in alone.forms.linears.items():
            low_rank = found.forms.linears[module].low_rank
            assert form.low_rank is not None and low_rank is not None
            assert torch.equal(low_rank.a_RD, form.low_rank.a_RD) and torch.equal(low_rank.b_OR, form.low_rank.b_OR)


def test_a_file_swapped_after_it_was_verified_is_refused(adapter: Any, base: Base, reader: ParallelReader) -> None:
    """Its path, size and modification time are those of the verified file."""
    digest = read(adapter.path, base, reader).digest
    assert read(adapter.path, base, reader, digest).digest == digest
    overwrite_end(adapter.path / WEIGHTS, b"\0\0\0\0")
    changed = read(adapter.path, base, reader, digest)
    with pytest.raises(AdapterChanged, match=f"'sql': the files have the digest {folder_digest(adapter.path)[:12]}"):
        _ = changed.digest


def test_a_swapped_config_is_refused(adapter: Any, base: Base, reader: ParallelReader) -> None:
    digest = read(adapter.path, base, reader).digest
    adapter.set(lora_alpha=99)
    with pytest.raises(AdapterChanged, match="the files have the digest"):
        read(adapter.path, base, reader, digest).content.confirm()


def test_another_known_content_is_refused_too(adapter: Any, base: Base, reader: ParallelReader) -> None:
    first = read(adapter.path, base, reader).digest
    overwrite_end(adapter.path / WEIGHTS, b"\0\0\0\0")
    second = read(adapter.path, base, reader).digest
    assert second != first
    with pytest.raises(AdapterChanged, match=f"digest {second[:12]}"):
        read(adapter.path, base, reader, first).content.confirm()


def test_a_wrong_digest_is_never_packed(adapter: Any, base: Base, reader: ParallelReader) -> None:
    model = LoRAModel.from_local_checkpoint(
        adapter.path,
        base=base,
        config=LoRAConfig(),
        dtype=torch.float32,
        name="sql",
        expected_digest="0" * 64,
        reader=reader,
    )
    with pytest.raises(AdapterChanged, match="registered with 000000000000"):
        pack(model, BaseParts([]), torch.float32, lambda size: torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_in_the_last_tensor(
    adapter: Any, base: Base, reader: ParallelReader, value: float
) -> None:
    overwrite_end(adapter.path / WEIGHTS, torch.tensor([value]).numpy().tobytes())
    infos = load_file(adapter.path / WEIGHTS)
    [name] = [name for name, tensor in infos.items() if not tensor.isfinite().all()]
    with pytest.raises(AdapterMalformed, match=f"{name}.* has NaN or infinite values"):
        read(adapter.path, base, reader)


def test_a_wrong_digest_explains_wrong_values(adapter: Any, base: Base, reader: ParallelReader) -> None:
    digest = read(adapter.path, base, reader).digest
    overwrite_end(adapter.path / WEIGHTS, torch.tensor([float("nan")]).numpy().tobytes())
    for threads in (reader, None):
        with pytest.raises(AdapterChanged, match="the files have the digest"):
            read(adapter.path, base, threads, digest)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    adapter: Any, base: Base, reader: ParallelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_at = adapter.path / WEIGHTS, OpenFile.read_at

    def truncate_and_read(self: OpenFile, target: Sequence[memoryview], offset: int) -> None:
        os.truncate(path, path.stat().st_size - 1)
        read_at(self, target, offset)

    monkeypatch.setattr(OpenFile, "read_at", truncate_and_read)
    with pytest.raises(AdapterMalformed, match="is truncated"):
        read(adapter.path, base, reader)


def test_a_file_that_is_written_while_it_is_read_is_refused(
    adapter: Any, base: Base, reader: ParallelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_at = adapter.path / WEIGHTS, OpenFile.read_at

    def read_and_write(self: OpenFile, target: Sequence[memoryview], offset: int) -> None:
        read_at(self, target, offset)
        overwrite_end(path, b"\0\0\0\0")

    monkeypatch.setattr(OpenFile, "read_at", read_and_write)
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        read(adapter.path, base, reader)


def test_a_content_is_recognized_by_all_of_its_pieces(tmp_path: Path, known: KnownDigests) -> None:
    """The digests that are made up here show which content was found again."""
    data = torch.arange(5 * PIECE_BYTES // 2, dtype=torch.int32).view(torch.uint8)
    (tmp_path / WEIGHTS).write_bytes(data.numpy().tobytes())
    pieces = [(len(piece), hashlib.sha256(piece.numpy().tobytes()).digest()) for piece in data.split(PIECE_BYTES)]
    before = hashlib.sha256(b"config")
    known.add(combined(before, b"in order", pieces), "this content")
    known.add(combined(hashlib.sha256(b"other config"), b"in order", pieces), "another config")
    known.add(combined(before, b"in order", [*pieces[:-1], (pieces[-1][0], b"")]), "another last piece")
    reader = ParallelReader(MIN_THREADS_FOR_PIECES, PIECE_BYTES, known)
    for expected in ("this content", "another config"):
        with AdapterFolder.at(tmp_path).open(WEIGHTS, 1 << 20) as file:
            target = torch.zeros_like(data)
            found = reader.read(file, target, None, before, expected)
        assert found.digest.result() == "this content"
        assert found.largest is None and torch.equal(target, data)
    (tmp_path / WEIGHTS).write_bytes(bytes(len(data)))
    with AdapterFolder.at(tmp_path).open(WEIGHTS, 1 << 20) as file:
        found = reader.read(file, target, None, before, "this content")
        assert found.digest.result() == hashlib.sha256(b"config" + bytes(len(data))).hexdigest()
    reader.stop()


def test_small_contents_are_read_on_the_calling_thread(reader: ParallelReader) -> None:
    assert not reader.takes(2 * PIECE_BYTES) and reader.takes(2 * PIECE_BYTES + 1)


def test_an_error_of_one_part_is_raised_after_all_parts(reader: ParallelReader) -> None:
    done: list[int] = []

    def add(number: int) -> None:
        if number == 1:
            raise AdapterMalformed("one")
        done.append(number)

    with pytest.raises(AdapterMalformed, match="one"):
        reader.for_each(add, range(4))
    assert sorted(done) == [0, 2, 3]

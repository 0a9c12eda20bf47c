"""Files that change while they are read, and what is no file: protocol/adapter_formats/adapter_files.py."""

from __future__ import annotations

import os
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.adapter_formats.adapter_files import (
    CHUNK_BYTES,
    AdapterFolder,
    OpenFile,
    folder_digest,
    open_weights,
    read_buffer,
    read_config,
)
from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed, AdapterMissing, RankTooLarge


def while_weights_are_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    read = OpenFile.read_into

    def read_while_changing(self: OpenFile, target: memoryview, digest: Any) -> None:
        read(self, target, digest)
        if self.name.endswith(".safetensors"):
            change()

    monkeypatch.setattr(OpenFile, "read_into", read_while_changing)


def test_a_file_that_changes_while_it_is_read_is_refused(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    while_weights_are_read(monkeypatch, lambda: os.utime(adapter.path / "adapter_model.safetensors", ns=(1, 1)))
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        adapter.load()


def test_a_file_is_read_through_pages_that_no_heap_keeps(tmp_path: Path) -> None:
    """A thread's heap would keep a whole buffer for good, as glibc's does once one such block was freed."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(CHUNK_BYTES + 1))
    tracemalloc.start()
    try:
        folder_digest(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < CHUNK_BYTES / 4
    finally:
        tracemalloc.stop()


def write_draft(folder: Path, size: int) -> None:
    (folder / "draft").mkdir()
    (folder / "draft" / "adapter_config.json").write_text("{}")
    (folder / "draft" / "adapter_model.safetensors").write_bytes(bytes(size))


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all buffers that files are read into."""
    found: list[int] = []

    def counted(num_bytes: int) -> Any:
        found.append(num_bytes)
        return read_buffer(num_bytes)

    monkeypatch.setattr("lorafleet.protocol.adapter_formats.adapter_files.read_buffer", counted)
    return found


@pytest.mark.parametrize("keeps_draft", [True, False])
def test_a_draft_lora_is_held_once_if_it_is_wanted_and_else_not_at_all(
    adapter: Any, buffers: list[int], keeps_draft: bool
) -> None:
    """And it is hashed once, as a part of the adapter's digest."""
    size, before = 3 * CHUNK_BYTES, adapter.load().digest
    write_draft(adapter.path, size)
    tracemalloc.start()
    try:
        loaded = adapter.load(keeps_draft=keeps_draft)
        assert tracemalloc.get_traced_memory()[1] < size / 2, "there is no copy beside the buffer"
    finally:
        tracemalloc.stop()
    assert [num_bytes for num_bytes in buffers if num_bytes >= size] == [size] * keeps_draft
    assert (loaded.draft is not None and len(loaded.draft.weights) == size) == keeps_draft
    assert loaded.digest == folder_digest(adapter.path) != before


def test_a_draft_lora_is_not_read_before_the_adapter_is_judged(adapter: Any, buffers: list[int]) -> None:
    write_draft(adapter.path, CHUNK_BYTES)
    with pytest.raises(RankTooLarge):
        adapter.load(keeps_draft=True, max_lora_rank=1)
    assert max(buffers) < CHUNK_BYTES


def test_content_changed_under_the_old_time_is_noticed(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    times = path.stat()

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    while_weights_are_read(monkeypatch, overwrite)
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        adapter.load()


def test_a_file_that_is_being_written_is_not_begun_with(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sleep = adapter.path / "adapter_model.safetensors", time.sleep

    def sleep_and_write(seconds: float) -> None:
        sleep(seconds)
        path.write_bytes(path.read_bytes())

    monkeypatch.setattr("lorafleet.protocol.adapter_formats.adapter_files.time.sleep", sleep_and_write)
    path.write_bytes(path.read_bytes())
    with (
        pytest.raises(AdapterChanged, match=r"safetensors is being written"),
        AdapterFolder.at(adapter.path).open(path.name, 1 << 20),
    ):
        pass


def test_a_clock_that_lags_is_waited_for(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is past the file's time, a write would leave that as it is."""
    path = adapter.path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes())
    written_ns, real = path.stat().st_ctime_ns, time.clock_gettime_ns
    lagging = [written_ns - 4_000_000, written_ns, written_ns]
    monkeypatch.setattr(
        "lorafleet.protocol.adapter_formats.adapter_files.time.clock_gettime_ns",
        lambda clock: lagging.pop(0) if lagging else real(clock),
    )
    with AdapterFolder.at(adapter.path).open(path.name, 1 << 20):
        assert not lagging


def test_a_folder_that_is_replaced_amid_a_load_is_never_mixed(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = adapter.path.parent / "other"
    shutil.copytree(adapter.path, other)
    type(adapter)(other).set(lora_alpha=99)

    def replace() -> None:
        if other.exists():
            adapter.path.rename(adapter.path.parent / "old")
            other.rename(adapter.path)

    while_weights_are_read(monkeypatch, replace)
    with pytest.raises(AdapterChanged, match="json changed while the weights were read"):
        adapter.load()


def test_a_file_that_grows_or_shrinks_amid_a_load_is_refused(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    for size in (path.stat().st_size + 4096, 64):
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            while_weights_are_read(patch, lambda: os.truncate(path, size))  # noqa: B023  # it is called in this turn
            with pytest.raises((AdapterChanged, AdapterMalformed), match=r"changed while|truncated"):
                adapter.load()
        path.write_bytes(before)


def test_a_path_with_nul_is_missing() -> None:
    with pytest.raises(AdapterMissing, match="NUL"):
        AdapterFolder.at("/tmp/a\0b")


def test_a_socket_is_not_opened(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    path.unlink()
    monkeypatch.chdir(adapter.path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
        with pytest.raises(AdapterMalformed, match="not a regular file"):
            open_weights(AdapterFolder.at(adapter.path))


class Swap:
    """Puts a symlink to `other` in the place of `path` at the first os.open: before it, or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, other: Path, *, before: bool) -> None:
        self.path, self.other, self.before, self.done = path, other, before, False
        self._open = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, *arguments: Any, **named: Any) -> int:
        if self.done:
            return self._open(*arguments, **named)
        self.done = True
        if self.before:
            self._swap()
        opened = self._open(*arguments, **named)
        if not self.before:
            self._swap()
        return opened

    def _swap(self) -> None:
        self.path.rename(self.path.with_name("aside"))
        self.path.symlink_to(self.other)


@pytest.fixture
def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    mine, other = tmp_path / "mine" / "sql", tmp_path / "other"
    for folder, content in ((mine, "mine"), (other, "another's")):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(content)
    return mine, other


def test_a_folder_that_is_swapped_after_it_was_checked_is_not_followed(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = two_folders
    folder = AdapterFolder.at(mine, str(mine.parent))
    Swap(monkeypatch, mine, other, before=True)
    with pytest.raises(AdapterMalformed, match="symlink that leaves"):
        read_config(folder)


def test_a_file_that_is_swapped_after_it_was_opened_changes_nothing(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = two_folders
    folder = AdapterFolder.at(mine, str(mine.parent))
    Swap(monkeypatch, mine / "adapter_config.json", other / "adapter_config.json", before=False)
    assert read_config(folder) == b"mine"


def test_a_folder_must_lie_where_it_was_allowed(two_folders: tuple[Path, Path]) -> None:
    mine, other = two_folders
    mine.rename(mine.with_name("aside"))
    mine.symlink_to(other)
    with pytest.raises(AdapterChanged, match="leads out of"):
        AdapterFolder.at(mine, str(mine.parent))
    assert AdapterFolder.at(mine).path == other, "the operator may have links anywhere"

"""What a server writes is its user's alone, whatever the umask is, unless its folder says that the group shares it."""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.cluster.batches.batch_records import FileRecord, new_id
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.tenancy import key_file
from lorafleet.cluster.tenancy.key_file import KeyFile
from lorafleet.cluster.tenancy.line_file import LineFile
from lorafleet.resolvers.cache import AdapterCache
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.private_files import keep_private

ADAPTER = Path(__file__).parents[2] / "demo" / "adapters" / "pirate"
OWNERS_BITS = 0o700


@pytest.fixture(params=[0, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes_in(root: Path) -> dict[str, int]:
    """Modes by path, without those of links, which the kernel does not ask for."""
    found = [root, *(path for path in root.rglob("*") if not path.is_symlink())]
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in found}


def write_everything(root: Path, files: dict[str, bytes]) -> None:
    """Writes as a server does: a catalogue, batches, fetched adapters, usage and keys."""
    source = root.parent / "source"
    (source / "draft").mkdir(parents=True)
    for name, content in [*files.items(), *((f"draft/{name}", content) for name, content in files.items())]:
        (source / name).write_bytes(content)
    catalogue = FolderStore(root / "state" / "catalogue")
    catalogue.create("log/1", b"who owns what")
    catalogue.put_files("a" * 64, source)
    draft = catalogue.draft()
    for name, content in files.items():
        draft.write(name, content)
    draft.publish("b" * 64)
    draft.discard()
    record = FileRecord(new_id("file-", 1.8e9), "0" * 32, 7, 1_800_000_000, 1_800_086_400, "in.jsonl", "batch")
    BatchStore(FolderStore(root / "batches"), lambda: 1 << 20, lambda: 1.8e9).files.add(record, io.BytesIO(b"prompts"))
    cache = AdapterCache(root / "fetched" / "adapters", 1 << 20)
    with cache.draft(
        {name: len(data) for name, data in files.items()}, FetchDeadline(60.0, "it", threading.Event())
    ) as made:
        for name, data in files.items():
            (made / name).write_bytes(data)
        cache.publish(made, "its source")
    lines = LineFile(root / "state" / "usage", "usage-r")
    lines.append_durably(b"{}\n")
    lines.close()
    key_file.write(root / "state" / "keys.yaml", KeyFile())


@pytest.mark.usefixtures("umask")
def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "server"
    root.mkdir(mode=OWNERS_BITS)
    write_everything(root, {path.name: path.read_bytes() for path in ADAPTER.iterdir()})
    modes = modes_in(root)
    assert len(modes) > 20, "the walk finds what was written"
    assert {path: oct(mode) for path, mode in modes.items() if mode & ~OWNERS_BITS} == {}


@pytest.mark.usefixtures("umask")
def test_a_folder_that_its_group_shares_gives_what_is_in_it_to_the_group(tmp_path: Path) -> None:
    for given, file, folder in ((0o2770, 0o660, 0o2770), (0o2750, 0o640, 0o2750), (0o775, 0o600, 0o700)):
        root = tmp_path / oct(given)
        root.mkdir()
        root.chmod(given)
        FolderStore(root).create("log/1", b"")
        modes = modes_in(root)
        assert (modes["log/1"], modes["log"], modes["aside"]) == (file, folder, folder)


@pytest.mark.usefixtures("umask")
def test_a_servers_process_writes_private_files_by_libraries_too(tmp_path: Path) -> None:
    keep_private()
    (tmp_path / "by a library").mkdir()
    (tmp_path / "by a library" / "file").write_text("prompts")
    assert modes_in(tmp_path / "by a library") == {".": 0o700, "file": 0o600}

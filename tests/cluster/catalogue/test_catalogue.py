"""The state in memory is what the log says, whatever becomes of those who change it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore

LATE_S = 60.0  # of something that should have happened long ago, however slow the machine is


class Waiting(FolderStore):
    """Writes only when it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writes = threading.Event()
        self.may = threading.Event()

    def create(self, key: str, content: bytes) -> bool:
        if key.startswith("log/"):
            self.writes.set()
            assert self.may.wait(LATE_S)
        return super().create(key, content)


async def test_a_change_whose_caller_is_cancelled_is_seen(tmp_path: Path) -> None:
    store = Waiting(tmp_path)
    catalogue = Catalogue(store)
    await catalogue.load()
    told: list[set[str]] = []
    catalogue.on_change = told.append
    change = asyncio.create_task(catalogue.change("sql", lambda _: AdapterRecord("sql", aliases={"sql": ()})))
    assert await asyncio.to_thread(store.writes.wait, LATE_S)
    change.cancel()
    await asyncio.sleep(0)
    store.may.set()
    with pytest.raises(asyncio.CancelledError):
        await change
    assert "sql" in catalogue.state.adapters
    assert told == [{"sql"}]
    assert catalogue.position.next == 1
    await catalogue.read_on()
    assert told == [{"sql"}], "it is taken in once"

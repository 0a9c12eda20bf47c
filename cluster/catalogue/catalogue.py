"""The catalogue of adapters, with its state in memory and its log in a store. A change is durable before anybody can
see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from lorafleet.api.access.work_threads import CATALOGUE_LOG, in_turn
from lorafleet.cluster.catalogue.catalogue_log import SETTLE_S, CatalogueLog, Fenced
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Entry
from lorafleet.cluster.catalogue.catalogue_state import CatalogueState
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.log_end import LogPosition, read_store_id
from lorafleet.cluster.catalogue.packed import pack
from lorafleet.protocol.errors import InvalidRequest, Overloaded, StoreError

MAX_OVERTAKEN = 20
MAX_ENTRY_BYTES = 1 << 20  # Size of an adapter's record: versions with metadata, aliases with their history.

Decide = Callable[[AdapterRecord | None], Entry | None]
T = TypeVar("T")

logger = logging.getLogger("lorafleet.cluster")


class Catalogue:
    """A catalogue that is empty until load() has ended. It runs on one event loop and calls the store in threads."""

    def __init__(self, store: Store, settle_s: float = SETTLE_S) -> None:
        self.store = store
        self._log = CatalogueLog(store, settle_s)
        self.state = CatalogueState(store.files_uri)
        self.position = LogPosition("", 0)  # The part of the log that `state` contains.
        # Called with the public names that a change may affect; load() does not call it.
        self.on_change: Callable[[set[str]], None] = lambda _: None
        # Called with adapters as they were before another writer changed them.
        self.on_others: Callable[[list[AdapterRecord]], None] = lambda _: None
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Reads the whole log, which takes seconds for a million adapters."""
        await _to_the_end(self._load_first())

    async def _load_first(self) -> None:
        store_id = await in_turn(CATALOGUE_LOG, read_store_id, self.store)
        self.state = await in_turn(CATALOGUE_LOG, self._load)
        self.position = LogPosition(store_id, self._log.length)

    async def change(self, name: str, decide: Decide) -> AdapterRecord | None:
        """Writes the entry that `decide` returns for the present adapter, and returns the adapter as it is afterwards.

        `decide` returns None to change nothing, and raises if the change cannot be made. It is called again if another
        writer was first. Raises OutcomeUnknown if the change may have been written; read_on() finds it then.
        """
        return await _to_the_end(self._change(name, decide))

    async def _change(self, name: str, decide: Decide) -> AdapterRecord | None:
        async with self._writing:
            for _ in range(MAX_OVERTAKEN):
                entry = decide(self.state.adapters.get(name))
                if entry is None:
                    return self.state.adapters.get(name)
                _check_size(entry)
                try:
                    others = await in_turn(CATALOGUE_LOG, self._log.append, entry)
                except Fenced:
                    await self._load_again()
                    continue
                if not others:
                    self._has_read()
                    self.on_change(self.state.apply(pack(entry)))
                    return self.state.adapters.get(name)
                self._take_in(others)
        raise Overloaded(
            f"adapter {name!r}: other writers to the catalogue overtook this change {MAX_OVERTAKEN} times. Try again."
        )

    async def read_on(self) -> None:
        """Applies the changes that other processes have written to the same store, and changes of this process whose
        outcome was unknown. Raises StoreError."""
        await _to_the_end(self._read_on())

    async def _read_on(self) -> None:
        async with self._writing:
            try:
                others = await in_turn(CATALOGUE_LOG, self._log.read_on)
            except Fenced:
                await self._load_again()
            else:
                self._take_in(others)

    def _has_read(self) -> None:
        """Moves the position in the log. Called right before the changes are applied, so that nobody can see one
        without the other."""
        self.position = LogPosition(self.position.store_id, self._log.length)

    def _take_in(self, others: Iterable[Entry]) -> None:
        self._has_read()
        for entry in others:
            before = self.state.adapters.get(entry.name)
            self.on_change(self.state.apply(pack(entry)))
            if before is not None:
                self.on_others([before])

    async def _load_again(self) -> None:
        before = self.state
        after = await in_turn(CATALOGUE_LOG, self._load)
        changed = await in_turn(CATALOGUE_LOG, before.adapters.differing, after.adapters)
        self.state = after
        self._has_read()
        adapters = [before.adapters[name] for name in changed if name in before.adapters]
        now = [after.adapters[name] for name in changed if name in after.adapters]
        self.on_change({alias for adapter in (*adapters, *now) for alias in adapter.aliases})
        self.on_others(adapters)

    def _load(self) -> CatalogueState:
        state = CatalogueState(self.store.files_uri)
        for entry in self._log.load().values():
            state.apply(entry)
        state.sort_names()
        return state


def _check_size(entry: Entry) -> None:
    """Raises InvalidRequest if the record is too large, since every change writes the adapter's whole record."""
    num_bytes = len(pack(entry))
    if num_bytes > MAX_ENTRY_BYTES:
        raise InvalidRequest(
            f"the record of adapter {entry.name!r} would have {num_bytes} bytes; at most {MAX_ENTRY_BYTES} are "
            "allowed. Remove aliases, or push with less metadata."
        )


async def keep_reading(catalogue: Catalogue, pause_s: float) -> None:
    """Follows the changes that other processes write to the store. Logs an outage of the store as a warning only
    once."""
    has_failed = False
    while True:
        await asyncio.sleep(pause_s)
        try:
            await catalogue.read_on()
            has_failed = False
        except StoreError as error:
            level = logging.DEBUG if has_failed else logging.WARNING
            logger.log(level, "other servers' changes cannot be read: %s", error)
            has_failed = True


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finishes the work even if the caller is cancelled. The log takes one call at a time, and what is in the log must
    be in the state."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

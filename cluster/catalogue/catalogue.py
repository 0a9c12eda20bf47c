"""The catalogue: its state in memory, its log in a store. A change is durable before anybody can see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lorafleet.cluster.catalogue.log import CatalogueLog, Fenced
from lorafleet.cluster.catalogue.packed import pack
from lorafleet.cluster.catalogue.records import Adapter, Entry
from lorafleet.cluster.catalogue.state import CatalogueState
from lorafleet.cluster.catalogue.store import Store
from lorafleet.workers.errors import Overloaded

MAX_OVERTAKEN = 20

Decide = Callable[[Adapter | None], Entry | None]


class Catalogue:
    """Empty until load() has ended. on_change: told the public names that a change may have touched, by a change and
    not by load(). One event loop; the store's calls in threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._log = CatalogueLog(store)
        self.state = CatalogueState(store.files_uri)
        self.on_change: Callable[[set[str]], None] = lambda _: None
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Reads everything: seconds, where there are a million adapters."""
        self.state = await asyncio.to_thread(self._load)

    async def change(self, name: str, decide: Decide) -> Adapter | None:
        """Writes what `decide` makes of the present adapter (None: leave it so), and returns what is there then.

        decide is asked again where another writer was first; it raises where the change cannot be made.
        """
        async with self._writing:
            for _ in range(MAX_OVERTAKEN):
                entry = decide(self.state.adapters.get(name))
                if entry is None:
                    return self.state.adapters.get(name)
                try:
                    others = await asyncio.to_thread(self._log.append, entry)
                except Fenced:
                    before, self.state = self.state, await asyncio.to_thread(self._load)
                    self.on_change({*before.aliases(), *self.state.aliases()})
                    continue
                for one in others or (entry,):
                    self.on_change(self.state.apply(pack(one)))
                if not others:
                    return self.state.adapters.get(name)
        raise Overloaded(
            f"adapter {name!r}: other writers to {self.store.uri} were first {MAX_OVERTAKEN} times; try again."
        )

    def _load(self) -> CatalogueState:
        state = CatalogueState(self.store.files_uri)
        for entry in self._log.load().values():
            state.apply(entry)
        return state

"""Reads and changes adapters in the catalogue, for the verbs of administration."""

from __future__ import annotations

from collections.abc import Callable

from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.errors import ModelNotFound

Decide = Callable[[AdapterRecord | None], AdapterRecord | None]


class AdapterChanges:
    """Changes adapters one at a time; a change is durable and known to every replica when its call returns.

    Args:
        repin: Orders the pins that a change has moved.
    """

    def __init__(self, directory: AdapterDirectory, repin: Callable[[], None]) -> None:
        self._directory = directory
        self._repin = repin

    def find(self, name: str) -> AdapterRecord:
        """Returns the adapter, which may be one that is being removed. Raises ModelNotFound."""
        adapter = self._directory.catalogue.state.adapters.get(name)
        if adapter is None:
            raise not_found(name)
        return adapter

    async def change(self, name: str, decide: Decide) -> AdapterRecord:
        """Writes what `decide` returns for the present adapter; None leaves the adapter as it is. `decide` may be
        called again if another server of the same catalogue writes at the same time."""
        adapter = await self._directory.catalogue.change(name, decide)
        assert adapter is not None, "only removal takes it away"
        self._repin()
        await self._directory.leases.acknowledged()
        return adapter

    async def edit(self, name: str, edit: Callable[[AdapterRecord], AdapterRecord | None]) -> AdapterRecord:
        """Changes an existing adapter. Raises ModelNotFound, also if the adapter is being removed."""

        def decide(present: AdapterRecord | None) -> AdapterRecord | None:
            if present is None or present.removing:
                raise not_found(name)
            return edit(present)

        return await self.change(name, decide)


def not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"There is no adapter `{name}` in the catalogue.", "name")

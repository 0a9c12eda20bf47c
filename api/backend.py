"""Declares what the front needs from the layers below it: an engine and a catalog of adapters.

protocol/transport/engine_socket.py implements the engine client, and cluster/serve/adapter_lookup.py the catalog.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import AdapterMove, EngineHello, EngineRequest, EngineStats, TokenOutput
from lorafleet.protocol.transport.unread_outputs import IsStalled, never_stalled


class Outputs(Protocol):
    """An iterator over the outputs of one sequence."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    async def aclose(self) -> None: ...


class EngineBackend(Protocol):
    @property
    def hello(self) -> EngineHello: ...

    @property
    def stats(self) -> EngineStats:
        """The statistics that the engine reported last."""
        ...

    @property
    def dead(self) -> str | None:
        """The reason why the engine stopped, or None while it runs."""
        ...

    def listen_to_moves(self, listener: Callable[[AdapterMove], None]) -> None:
        """Calls the listener for every move of an adapter between tiers, including moves before this call."""
        ...

    def generate(self, request: EngineRequest, is_stalled: IsStalled = never_stalled) -> Outputs:
        """Returns the outputs of one sequence. Closing or canceling the iterator aborts the sequence. So do too many
        outputs that wait while `is_stalled` says that their stream waits for its client.

        The engine's errors are raised as LorafleetError.
        """
        ...

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo: ...

    async def drop_adapter(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The storage limits of a tenant. None means no limit."""

    adapters: int | None = None  # Number of adapters.
    num_bytes: int | None = None  # Bytes of all versions together, in the serving dtype.


class AdapterCatalog(Protocol):
    """The adapters by their full names. It is never asked for a name of the base model."""

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        """Returns the first adapters, by full name, whose names are greater than `after` and less than `end`."""
        ...

    @property
    def list_version(self) -> object | None:
        """A value that changes whenever the results of listed() may change, or None while this is unknown."""
        ...

    async def known(self, name: str) -> LoRARequest | None:
        """Returns the adapter, or None if only a resolver might know the name."""
        ...

    async def resolve(self, name: str, key: str | None = None, group: str = "") -> LoRARequest:
        """Returns the adapter of this name, and looks for it elsewhere if the catalog does not have it.

        Args:
            key: Selects one of several versions that share the name. The same key selects the same version.
            group: The tenant or adapter under which a search elsewhere is scheduled.

        Raises ModelNotFound, AdapterError if the adapter exists but cannot be served, and QueueFull if too many
        searches of the group are waiting.
        """
        ...

    async def add(
        self, name: str, path: str, *, load_inplace: bool, limits: StorageLimits, within: str | None
    ) -> LoRARequest:
        """Adds the adapter on every replica.

        Args:
            load_inplace: Allows a new version of an adapter that exists.
            limits: Storage limits of the tenant in the name.
            within: The folder that a local path must lie in when it is read. None allows any folder.

        Raises AdapterExists, InvalidAdapterName and every other AdapterError.
        """
        ...

    async def remove(self, name: str) -> None:
        """Removes the adapter from every replica. Raises ModelNotFound."""
        ...

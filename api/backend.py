"""What the front needs from behind it: an engine and a catalogue of adapters.

The engine client is protocol/transport.py's; the catalogue is cluster/serve/adapter_lookup.py's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import AdapterMove, EngineHello, EngineRequest, EngineStats, TokenOutput


class EngineClient(Protocol):
    @property
    def hello(self) -> EngineHello: ...

    @property
    def stats(self) -> EngineStats:
        """As last heard."""
        ...

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it runs."""
        ...

    def listen_to_moves(self, listener: Callable[[AdapterMove], None]) -> None:
        """Gets every move of an adapter between tiers from now on, and those before it if nobody listened then."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Closing or cancelling it aborts the sequence. The engine's errors are raised as LorafleetError."""
        ...

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo: ...

    async def drop_adapter(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """What a tenant may keep. None: no limit. num_bytes: of all versions, in the serving dtype."""

    adapters: int | None = None
    num_bytes: int | None = None


class AdapterCatalog(Protocol):
    """Base model names never come here."""

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        """The first adapters whose full names are greater than `after` and less than `end`, in order."""
        ...

    @property
    def list_version(self) -> object | None:
        """Another one whenever listed() may answer otherwise than before; None if that is not known now."""
        ...

    async def known(self, name: str) -> LoRARequest | None:
        """None where only a resolver might know it."""
        ...

    async def resolve(self, name: str, key: str | None = None, group: str = "") -> LoRARequest:
        """key: where versions share a name, the same key draws the same one. group: whose turn it takes where the name
        must be looked for elsewhere.

        Raises ModelNotFound, AdapterError where the adapter exists but cannot be served, and QueueFull where too many
        names of the group are being looked for.
        """
        ...

    async def add(
        self, name: str, path: str, *, load_inplace: bool, limits: StorageLimits, within: str | None
    ) -> LoRARequest:
        """Acts on every replica. limits: of the tenant that the name says. within: the folder that a local path must
        lie in when it is read; None: anywhere.

        Raises AdapterExists, InvalidAdapterName and every other AdapterError."""
        ...

    async def remove(self, name: str) -> None:
        """Acts on every replica. Raises ModelNotFound."""
        ...

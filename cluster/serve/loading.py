"""Wraps the engine so that a loaded adapter is checked completely. An adapter with a fault then fails its push or
load, not a later request."""

from __future__ import annotations

from lorafleet.api.languages import AdapterLanguages
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.transport import EngineClient


class CheckingEngine:
    """An engine that loads weights in its process, then reads the tokenizer, template and formats beside them."""

    def __init__(self, engine: EngineClient, languages: AdapterLanguages) -> None:
        self._engine = engine
        self._languages = languages

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Loads and checks an adapter. Raises AdapterError if it cannot be served."""
        info = await self._engine.load_adapter(lora)
        await self._languages.check(lora, info)
        return info

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Pins and checks an adapter. Raises AdapterError if it cannot be served."""
        info = await self._engine.pin_adapter(lora)
        await self._languages.check(lora, info)
        return info

    async def drop_adapter(self, digest: str) -> None:
        await self._engine.drop_adapter(digest)

    async def unpin_adapter(self, digest: str) -> None:
        await self._engine.unpin_adapter(digest)

    async def drained(self, digest: str) -> None:
        await self._engine.drained(digest)

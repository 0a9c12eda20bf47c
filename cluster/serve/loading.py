"""The engine as the catalogue has it: what it loads is checked whole, so that it is the push or the load that fails."""

from __future__ import annotations

from lorafleet.api.languages import AdapterLanguages
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.transport import EngineClient


class CheckingEngine:
    """Loads weights in the engine's process, then reads the tokenizer, template and formats that lie beside them."""

    def __init__(self, engine: EngineClient, languages: AdapterLanguages) -> None:
        self._engine = engine
        self._languages = languages

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Raises AdapterError."""
        info = await self._engine.load_adapter(lora)
        await self._languages.check(lora, info)
        return info

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Raises AdapterError."""
        info = await self._engine.pin_adapter(lora)
        await self._languages.check(lora, info)
        return info

    async def drop_adapter(self, digest: str) -> None:
        await self._engine.drop_adapter(digest)

    async def unpin_adapter(self, digest: str) -> None:
        await self._engine.unpin_adapter(digest)

    async def drained(self, digest: str) -> None:
        await self._engine.drained(digest)

"""Loads adapters with complete checks, so that an adapter with a fault fails its push or load, not a later request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from lorafleet.api.languages import AdapterLanguages
from lorafleet.cluster.config import LoRAModule
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import AdapterError
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.transport.engine_socket import EngineClient


class CheckingEngine:
    """An engine that loads weights in its process, then reads the tokenizer, template and formats beside them."""

    def __init__(self, engine: EngineClient, languages: AdapterLanguages) -> None:
        self._engine = engine
        self._languages = languages

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Loads and checks an adapter. Raises AdapterError if it cannot be served."""
        info = await self._engine.load_adapter(lora)
        if lora.memory is None:  # Otherwise its files may not be there yet. They are checked when it is registered.
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

    async def control(self, control: EngineControl) -> None:
        await self._engine.control(control)


async def load_modules(catalog: DirectoryCatalog, modules: Sequence[LoRAModule], membership: Membership) -> None:
    """Loads the configured adapters, and publishes them in the given order. All are requested at once, since the
    worker reads several at a time."""

    async def read(module: LoRAModule) -> tuple[LoRARequest, AdapterInfo]:
        began_s = time.monotonic()
        entry = await read_module(catalog, module)
        await membership.publish_progress(f"adapter {module.name} ready after {time.monotonic() - began_s:.2f} s")
        return entry

    for entry in await asyncio.gather(*(read(module) for module in modules)):
        await catalog.seed(*entry)


async def read_module(catalog: DirectoryCatalog, module: LoRAModule) -> tuple[LoRARequest, AdapterInfo]:
    """Loads a configured adapter. Raises AdapterError, which names it."""
    try:
        return await catalog.read_at_start(module.name, module.path, module.base_model_name)
    except AdapterError as error:
        raise type(error)(f"adapter {module.name!r} cannot be served: {error.message}", error.param) from None

"""Finds the model that a request names, as far as the caller may see it: the base, an adapter, or a mix of adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.visibility import CallersCatalog, Tenants
from lorafleet.api.backend import AdapterCatalog, EngineBackend
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.recent import RecentFailures
from lorafleet.protocol import adapter_mix
from lorafleet.protocol.errors import AdapterError, InvalidRequest, LorafleetError, ModelNotFound
from lorafleet.protocol.limits import MAX_MODEL_CHARS, cut
from lorafleet.protocol.lora_request import LoRARequest, turn_group

# Returns whether the adapter with this digest was copied to this node since a time.monotonic().
FetchedSince = Callable[[str, float], bool]


class ModelLookup:
    """Finds models by the names in requests.

    Args:
        base_names: The names of the base model. The first is its ID.
        languages: Reads adapters' tokenizers and templates.
        failures: Records the lookups that failed.
    """

    def __init__(
        self,
        base_names: Sequence[str],
        engine: EngineBackend,
        catalog: AdapterCatalog,
        tenants: Tenants,
        languages: AdapterLanguages,
        failures: RecentFailures,
        fetched_since: FetchedSince,
    ) -> None:
        self.catalog = catalog
        self.tenants = tenants
        self._base_names = base_names
        self._engine = engine
        self._languages = languages
        self._failures = failures
        self._fetched_since = fetched_since

    def catalog_of(self, caller: Caller) -> CallersCatalog:
        """Returns the adapters that the caller may use or change."""
        return CallersCatalog(self.catalog, self.tenants, caller)

    async def find(
        self, caller: Caller, name: str | None, key: str | None = None, lora_weights: Sequence[float] | None = None
    ) -> ServedModel:
        """Returns the model that a request names.

        Args:
            name: A base name, an adapter's name, several joined by "+", or SGLang's `base:adapter`. None means the
                base model, as in vLLM.
            key: Selects one of several versions that share a name: the same key selects the same version. None
                selects one at random.
            lora_weights: The weights of a mix, see adapter_mix.py.

        Raises ModelNotFound, or AdapterError if the adapter exists but cannot be served.
        """
        try:
            return await self._find(caller, name, key, lora_weights)
        except LorafleetError as error:
            self._failures.record(error, name or "", caller.tenant)
            raise

    async def _find(
        self, caller: Caller, name: str | None, key: str | None, lora_weights: Sequence[float] | None
    ) -> ServedModel:
        if name is not None and len(name) > MAX_MODEL_CHARS:
            raise InvalidRequest(f"`model` has {len(name)} characters; at most {MAX_MODEL_CHARS} are allowed.", "model")
        catalog = self.catalog_of(caller)
        is_base = name is None or name in self._base_names
        if not is_base and name is not None and adapter_mix.SIGN in name:
            return await self._served(caller, name, await self._mix(catalog, name, key, lora_weights))
        if lora_weights is not None:
            raise InvalidRequest(
                "`lora_weights` applies to a mix of adapters, but `model` does not name a mix; name one, as in "
                f"'a{adapter_mix.SIGN}b'.",
                "lora_weights",
            )
        if name is None or is_base:
            return ServedModel(name or self._base_names[0], None, self._languages.base, caller)
        came_s = time.monotonic()
        try:
            lora = await self._adapter(catalog, name, key)
        except ModelNotFound:
            raise ModelNotFound(f"The model `{cut(name)}` does not exist.", "model") from None
        served = await self._served(caller, name, lora)
        return replace(served, fetched=self._fetched_since(lora.digest, came_s))

    async def _served(self, caller: Caller, name: str, lora: LoRARequest) -> ServedModel:
        try:
            return ServedModel(name, lora, await self._languages.of(lora, turn_group(caller.tenant, lora)), caller)
        except AdapterError as error:
            if not self._engine.hello.falls_back_to_base:
                raise
            self._failures.record(error, name, caller.tenant)
            return ServedModel(name, None, self._languages.base, caller, fallback_reason=error.message)

    async def _mix(
        self, catalog: CallersCatalog, name: str, key: str | None, weights: Sequence[float] | None
    ) -> LoRARequest:
        bases = self._base_names
        base = next((base for base in bases if name.startswith(base + ":")), None)
        names = (name if base is None else name.removeprefix(base + ":")).split(adapter_mix.SIGN)
        adapter_mix.check_count(len(names))  # This bounds the lookups below.
        loras = []
        for part in names:
            if part in bases:
                raise InvalidRequest(
                    f"`model` mixes in {part!r}, which is the base model; a mix is always added to the base, so name "
                    "adapters only.",
                    "model",
                )
            try:
                loras.append(await self._adapter(catalog, part, key))
            except ModelNotFound:
                raise ModelNotFound(f"The model `{cut(part)}` does not exist.", "model") from None
        return adapter_mix.mixed(loras, weights)

    async def _adapter(self, catalog: CallersCatalog, name: str, key: str | None) -> LoRARequest:
        for base in self._base_names:
            if name.startswith(base + ":") and await catalog.known(name) is None:
                try:
                    return await catalog.resolve(name.removeprefix(base + ":"), key)
                except ModelNotFound:
                    continue
        return await catalog.resolve(name, key)

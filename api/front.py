"""Holds what all routes share: the configuration, tokenizer, engine and adapters of one replica.

It also resolves the model that a request names. It knows nothing about request bodies.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from lorafleet.api.access.audit import Audit
from lorafleet.api.access.body_budget import BodyBudget
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.caller_admission import Quotas, WorkBounds
from lorafleet.api.access.fair_threads import LONG_WORK, FairThreads
from lorafleet.api.access.gate import Gate
from lorafleet.api.access.origins import Origins
from lorafleet.api.access.usage import UsageMeter
from lorafleet.api.access.visibility import CallersCatalog, NoTenants, Tenants
from lorafleet.api.answer.shared_run import SharedRun
from lorafleet.api.backend import AdapterCatalog, EngineBackend
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.routes.model_pages import ModelPages
from lorafleet.api.telemetry.http_metrics import Metrics
from lorafleet.api.telemetry.recent import RecentFailures, RecentTraffic
from lorafleet.api.telemetry.traffic_history import TrafficHistory
from lorafleet.api.text.adapter_language import Language
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import AnyTokenizer, TokenizerFiles
from lorafleet.api.text.tokenizing import Tokenizing
from lorafleet.api.tool_calls.known import FORMATS, KnownFormat, ToolCallFormat, detect
from lorafleet.protocol import adapter_mix, limits
from lorafleet.protocol.errors import AdapterError, ConfigError, InvalidRequest, LorafleetError, ModelNotFound
from lorafleet.protocol.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_MODEL_CHARS, cut
from lorafleet.protocol.lora_request import LoRARequest, turn_group
from lorafleet.protocol.messages import AdapterMove, Pooling, TokenizerFile

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    served_model_names: tuple[str, ...]  # The first is the ID of the base model, the others are aliases.
    model_path: str  # Shown as `root` of the base model.
    allow_runtime_lora_updating: bool = False  # Opens /v1/load_lora_adapter and /v1/unload_lora_adapter.
    chat_template: str | None = None  # Jinja source; None uses the tokenizer's template.
    tool_call_parser: ToolCallFormat = "auto"  # How models write calls; auto detects it from the template.
    pooling: Pooling = "last"  # Default for embeddings.
    queue_timeout_s: float | None = None  # Default time that a request may wait to start; None: no limit.
    origins: Origins = field(default_factory=Origins)  # Web pages that may use a server without API keys.
    max_body_bytes: int = MAX_BODY_BYTES  # Larger requests are rejected with 413.
    # Default sampling parameters, see read_generation_defaults().
    generation_defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    replica_id: str = ""  # Label of this replica in metrics.
    created: int = field(default_factory=lambda: int(time.time()))  # Seconds since 1970, shown by /v1/models.

    @property
    def base_id(self) -> str:
        return self.served_model_names[0]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of one request, for the caller that named it."""

    name: str  # The name in the client's request, which the answer must repeat.
    lora: LoRARequest | None  # None: the base model.
    language: Language  # Its tokenizer, chat template and output format.
    caller: Caller
    fetched: bool = False  # Its adapter was copied to this node while the request waited.
    fallback_reason: str | None = None  # Why the base model answers in place of an adapter that cannot be read.

    @property
    def tokenizer(self) -> AnyTokenizer:
        return self.language.tokenizer

    @property
    def turn_group(self) -> str:
        """The tenant or adapter under which its work in shared threads and processes is scheduled."""
        return turn_group(self.caller.tenant, self.lora)


class Front:
    """The state and the helpers that the routes of one replica share.

    Args:
        scrape: Returns the metrics of all replicas; None if there is only this one. Concurrent calls share one run.
        fetched_since: Returns whether the adapter with this digest was copied to this node since a time.monotonic().
        languages: Reads adapters' tokenizers and templates; None reads them from their own paths.
        gate: Authenticates callers.
        quotas: Limits what callers may request; None limits nobody.
        tenants: Knows which tenant owns which adapter names.
        meter: Records the usage of every sequence.
        audit: Records every administrative call.
    """

    def __init__(
        self,
        config: FrontConfig,
        tokenizer: Tokenizer,
        engine: EngineBackend,
        catalog: AdapterCatalog,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
        fetched_since: Callable[[str, float], bool] = lambda _digest, _since_s: False,
        languages: AdapterLanguages | None = None,
        gate: Gate | None = None,
        quotas: Quotas | None = None,
        tenants: Tenants | None = None,
        meter: UsageMeter | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine = engine
        self.catalog = catalog
        self.metrics = Metrics(lambda: engine.stats, config.base_id, config.replica_id)
        self.recent = RecentTraffic()
        self.history = TrafficHistory()
        self.failures = RecentFailures(config.replica_id)
        self.scrape: Callable[[], Awaitable[bytes]] = SharedRun(self.metrics.render if scrape is None else scrape)
        self.gate = Gate() if gate is None else gate
        self.quotas = quotas
        self.work_bounds = WorkBounds()
        self.body_budget = BodyBudget(max(MAX_BODIES_BYTES, 2 * config.max_body_bytes))
        self.long_work = FairThreads("long requests and answers", LONG_WORK)
        self.meter = meter
        self.audit = audit
        self.tenants: Tenants = NoTenants() if tenants is None else tenants
        self.model_pages = ModelPages()
        self._languages = AdapterLanguages(tokenizer, engine) if languages is None else languages
        self.templates = self._languages.templates
        self.tokenizing = Tokenizing()
        self._tokenizer_files = TokenizerFiles()
        self._fetched_since = fetched_since
        engine.listen_to_moves(self._count_move)

    def _count_move(self, move: AdapterMove) -> None:
        self.metrics.count_move(move)
        self.history.count_move(move)

    def shows_paths_to(self, caller: Caller) -> bool:
        """Returns whether the caller may see paths on the server. Without API keys, everyone may."""
        if caller.is_operator:
            return True
        try:
            self.gate.caller(None, "metrics")
        except LorafleetError:
            return False
        return True

    @property
    def max_model_len(self) -> int:
        return self.engine.hello.max_model_len

    @property
    def context_len(self) -> int:
        """The maximum number of tokens that the prompt and the answer of one request may have together."""
        return min(self.engine.hello.max_model_len, self.engine.hello.kv_cache_tokens)

    def vocab_size(self, model: ServedModel) -> int:
        own = model.language.vocabulary
        return self.engine.hello.vocab_size if own is None else own.size

    async def tokenizer_file(self, model: ServedModel) -> TokenizerFile:
        """Returns a file of the model's tokenizer for the engine's grammars, and writes it if it does not exist yet."""
        known = self._tokenizer_files.known(model.tokenizer)
        return known if known is not None else await asyncio.to_thread(self._tokenizer_files.of, model.tokenizer)

    def tool_format(self, model: ServedModel) -> KnownFormat | None:
        """Returns the format in which the model writes tool calls, or None if it is unknown."""
        if self.config.tool_call_parser != "auto":
            return FORMATS.get(self.config.tool_call_parser)
        return detect(self._tool_template(model))

    def shows_tools(self, model: ServedModel) -> bool:
        return "tools" in self._tool_template(model)

    def _tool_template(self, model: ServedModel) -> str:
        if model.language.template is not None:
            return model.language.template.source
        return self.config.chat_template or self.tokenizer.tool_template or ""

    def close(self) -> None:
        """Stops the threads and processes that tokenize, render templates and do long work."""
        self.tokenizing.close()
        self.long_work.close()
        self._languages.close()
        self._tokenizer_files.close()

    @property
    def dead(self) -> str | None:
        """The reason why the engine stopped, or None while it runs."""
        return self.engine.dead

    def catalog_of(self, caller: Caller) -> CallersCatalog:
        """Returns the adapters that the caller may use or change."""
        return CallersCatalog(self.catalog, self.tenants, caller)

    async def model(
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
            return await self._model(caller, name, key, lora_weights)
        except LorafleetError as error:
            self.failures.note(error, name or "", caller.tenant)
            raise

    async def _model(
        self, caller: Caller, name: str | None, key: str | None, lora_weights: Sequence[float] | None
    ) -> ServedModel:
        if name is not None and len(name) > MAX_MODEL_CHARS:
            raise InvalidRequest(f"`model` has {len(name)} characters; at most {MAX_MODEL_CHARS}.", "model")
        catalog = self.catalog_of(caller)
        is_base = name is None or name in self.config.served_model_names
        if not is_base and name is not None and adapter_mix.SIGN in name:
            return await self._served(caller, name, await self._mix(catalog, name, key, lora_weights))
        if lora_weights is not None:
            raise InvalidRequest(
                f"`lora_weights` is of mixed adapters, and `model` names none; name them as in 'a{adapter_mix.SIGN}b'.",
                "lora_weights",
            )
        if name is None or is_base:
            return ServedModel(name or self.config.base_id, None, self._languages.base, caller)
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
            if not self.engine.hello.falls_back_to_base:
                raise
            self.failures.note(error, name, caller.tenant)
            return ServedModel(name, None, self._languages.base, caller, fallback_reason=error.message)

    async def _mix(
        self, catalog: CallersCatalog, name: str, key: str | None, weights: Sequence[float] | None
    ) -> LoRARequest:
        bases = self.config.served_model_names
        base = next((base for base in bases if name.startswith(base + ":")), None)
        names = (name if base is None else name.removeprefix(base + ":")).split(adapter_mix.SIGN)
        adapter_mix.check_count(len(names))  # This bounds the lookups below.
        loras = []
        for part in names:
            if part in bases:
                raise InvalidRequest(f"`model` mixes in {part!r}, the base, which every adapter adds to.", "model")
            try:
                loras.append(await self._adapter(catalog, part, key))
            except ModelNotFound:
                raise ModelNotFound(f"The model `{cut(part)}` does not exist.", "model") from None
        return adapter_mix.mixed(loras, weights)

    async def _adapter(self, catalog: CallersCatalog, name: str, key: str | None) -> LoRARequest:
        for base in self.config.served_model_names:
            if name.startswith(base + ":") and await catalog.known(name) is None:
                try:
                    return await catalog.resolve(name.removeprefix(base + ":"), key)
                except ModelNotFound:
                    continue
        return await catalog.resolve(name, key)

    def label(self, model: ServedModel) -> str:
        """Returns the model's label in metrics."""
        return self.config.base_id if model.lora is None else self.metrics.adapters.label(model.lora.lora_name)

    def count_sequence(self, model: ServedModel) -> str:
        """Counts one more sequence of the model and returns its label in metrics."""
        return self.config.base_id if model.lora is None else self.metrics.adapters.count(model.lora.lora_name)


def read_generation_defaults(model_path: str | Path) -> Mapping[str, float]:
    """Reads the sampling defaults that the model's authors chose, as vLLM's `--generation-config auto` does."""
    path = Path(model_path) / "generation_config.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return MappingProxyType({})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    found = {name: content[name] for name in _DEFAULTED if content.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name} is {value!r}; it must be a number.")
        try:
            limits.SAMPLING[name].check(name, value)
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error.message} Correct the file, or remove the field.") from None
    return MappingProxyType(found)

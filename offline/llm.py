"""Offline use with vLLM's interface: LLM(model=..., enable_lora=True).generate(prompts, params, lora_request=...).

There is no Ray and no socket: the calling thread drives the same engine.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypedDict

import msgspec
import torch

from lorafleet.api.answer.routed_answer import RoutedAnswer, Rows
from lorafleet.api.text.adapter_language import Language, LanguageReader
from lorafleet.api.text.bad_words import spellings, token_sequences
from lorafleet.api.text.output import OutputProcessor
from lorafleet.api.text.templates import TemplateSandbox
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.api.text.tokenizers import Encoders
from lorafleet.protocol.adapter_mix import mixed
from lorafleet.protocol.engine_config import AsyncScheduling, EngineConfig, EngineOptions, SpeculativeConfig
from lorafleet.protocol.engine_control import ALL_MEMORY, MemoryTag, PauseMode, SleepEngine, SleepLevel, WakeEngine
from lorafleet.protocol.errors import ConfigError, InvalidRequest, from_wire
from lorafleet.protocol.lora_config import LoRAConfig, LoRAOptions
from lorafleet.protocol.lora_request import LoRARequest, check_generates
from lorafleet.protocol.messages import EngineRequest, FinishReason, TokenLogprobs, TokenOutput, Vocabulary
from lorafleet.protocol.options import options_of, values_of
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.rank_processes import RankProcesses
from lorafleet.workers.startup import build_engine
from lorafleet.workers.step_outputs import StepOutputs

__all__ = ["LLM", "CompletionOutput", "LoRARequest", "RequestOutput", "SamplingParams"]


STALLED_WAIT_S = 0.001  # After a step that could do nothing, as every request waits for its adapter.


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt's answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # One entry per token.
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # Stop string or stop token id; None for eos and length.
    # With enable_return_routed_experts, uint8 or uint16 [tokens, layers, experts a token] of prompt and answer but for
    # the last token.
    routed_experts: Rows | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    lora_request: LoRARequest | None = None
    # The reason why the base model answered in the adapter's place (on_lora_load_failure="base").
    fallback_reason: str | None = None
    finished: bool = True


@dataclass(slots=True)
class _Pending:
    """A sample that is being generated, and the place for its tokens."""

    result: RequestOutput
    completion: CompletionOutput
    processor: OutputProcessor
    routed: RoutedAnswer | None  # None if experts are not recorded.


@dataclass(frozen=True, kw_only=True)
class LLMOptions(LoRAOptions, EngineOptions):
    """The parameters of LLM: all but `model` are given by name."""

    enable_lora: bool = False
    lora_config: LoRAConfig | None = None  # In place of the single options of adapters.
    async_scheduling: AsyncScheduling = None
    # A mapping has the fields of SpeculativeConfig, whose names are vLLM's.
    speculative_config: SpeculativeConfig | Mapping[str, object] | None = None  # type: ignore[assignment]


P = ParamSpec("P")


def _with_parameters_of(
    options: Callable[P, LLMOptions],
) -> Callable[[Callable[..., None]], Callable[Concatenate[LLM, P], None]]:
    """Declares that a method has the parameters of LLMOptions, to type checkers, editors and help()."""

    def declare(method: Any) -> Any:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = inspect.Signature([own, *inspect.signature(options).parameters.values()])
        return method

    return declare


class LLM:
    """An engine for offline use. `model` is a local Hugging Face folder.

    The other arguments are those of LLMOptions: the options of EngineOptions and LoRAOptions. The latter require
    enable_lora=True and are rejected without it.
    """

    @_with_parameters_of(LLMOptions)
    def __init__(self, *args: Any, **given: Any) -> None:
        options = LLMOptions(*args, **given)
        config = EngineConfig(
            **values_of(EngineOptions, options)
            | {"speculative_config": SpeculativeConfig.of(options.speculative_config)},
            async_scheduling=options.async_scheduling,
            lora=_lora_config(options, given),
        )
        # An engine that was closed before may still have its GPU memory, since cycles of libraries' objects refer to
        # it. That was seen of the first engine of a process. A collection took .1 s in tests, so it is left out where
        # no GPU has been used.
        if torch.cuda.is_initialized():
            gc.collect()
        self._ranks = RankProcesses(config) if config.tensor_parallel_size > 1 else None
        try:
            if self._ranks is None:
                self._engine = build_engine(config)
            else:
                self._engine = build_engine(config, addresses=self._ranks.addresses, check=self._ranks.check)
        except BaseException:
            if self._ranks is not None:
                self._ranks.close()
            raise
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_files = TokenizerFiles()
        # For adapters' templates and tokenizers; no process runs before it is needed.
        self._templates, self._encoders = TemplateSandbox(), Encoders()
        self._model = Path(config.model)
        self._adapters: dict[tuple[int, str], LoRARequest] = {}
        self._sources = config.sources
        self._languages: dict[str, Language] = {}  # by digest, for adapters that have one of their own
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(self._model)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Returns one result per prompt, in order. A list of parameters or adapters must have one entry per prompt.

        Raises InvalidRequest or AdapterError before anything runs, and the engine's own errors while it runs.
        """
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        params = _entry_each(sampling_params or SamplingParams(), len(prompts), "sampling_params")
        loras = _entry_each(lora_request, len(prompts), "lora_request")
        resolved = [None if lora is None else self._resolve(lora) for lora in loras]
        pending: dict[str, _Pending] = {}
        results = [
            self._submit(prompt, p, lora, pending) for prompt, p, lora in zip(prompts, params, resolved, strict=True)
        ]
        try:
            while pending:
                for output in self._step():
                    self._deliver(output, pending)
        finally:
            for request_id in pending:
                self._engine.abort(request_id)
        return results

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Reads the adapter into host memory now; later requests with its id and path use exactly these weights."""
        self._resolve(lora_request)

    def mix_loras(self, loras: Sequence[LoRARequest], weights: Sequence[float] | None = None) -> LoRARequest:
        """Returns a request for the weighted sum of several plain LoRAs. Each weight is 1 if none are given."""
        return mixed([self._resolve(lora) for lora in loras], weights)

    def remove_lora(self, lora_int_id: int) -> None:
        """Removes the adapter; the next request with this id reads its files again."""
        for key in [key for key in self._adapters if key[0] == lora_int_id]:
            digest = self._adapters.pop(key).digest
            if self._engine.loras is not None and all(a.digest != digest for a in self._adapters.values()):
                self._engine.loras.drop(digest)

    def list_loras(self) -> list[LoRARequest]:
        """Returns the adapters that were used or added, with their digests."""
        return list(self._adapters.values())

    def has_own_language(self, lora_request: LoRARequest) -> bool:
        """Returns whether the adapter has a tokenizer, a vocabulary or a chat template that is not the base's."""
        language = self._languages.get(self._resolve(lora_request).digest)
        if language is None:
            return False
        return not (language.tokenizer is self.tokenizer and language.vocabulary is None and language.template is None)

    def pin_lora(self, lora_int_id: int) -> None:
        """Pins a previously used adapter in a slot. Raises AdapterError if no slot would remain for others."""
        for (number, _), lora in self._adapters.items():
            if number == lora_int_id and self._engine.loras is not None:
                loaded = self._engine.loras.pin(lora)
                while not loaded.done():
                    self._step()
                loaded.result()

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Gives the GPU memory back, to a trainer in another process. At level 1 the weights go to host memory; at
        level 2 they are read from the checkpoint at the wake-up."""
        self._order(SleepEngine(level, mode))

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> bool:
        """Takes these parts of the GPU memory again, all by default. Returns whether the checkpoint had other weights
        than before the sleep, so that all that was computed from the former ones was forgotten."""
        num_changes = self._engine.stats().base_changes_total
        self._order(WakeEngine(ALL_MEMORY if tags is None else tuple(tags)))
        return self._engine.stats().base_changes_total > num_changes

    def close(self) -> None:
        """Ends the engine and its processes, and frees their memory."""
        self._engine.close()
        self._templates.close()
        self._encoders.close()
        self._tokenizer_files.close()
        if self._ranks is not None:
            self._ranks.close()

    def _order(self, control: SleepEngine | WakeEngine) -> None:
        done = self._engine.control(control)
        while not done.done():
            self._step()
        done.result()

    def _step(self) -> StepOutputs:
        """Runs one step of the engine. After a stalled one it waits, since a loop without a pause would hold Python's
        lock, which the threads that read adapters need."""
        outputs = self._engine.step()
        if self._engine.stalled:
            time.sleep(STALLED_WAIT_S)
        return outputs

    def _resolve(self, lora: LoRARequest) -> LoRARequest:
        """Returns the request with its digest. Its files are read at the first call only."""
        key = (lora.lora_int_id, lora.lora_path)
        if key not in self._adapters:
            loading = self._engine.load_adapter(lora)
            while not loading.done():
                self._step()
            info = loading.result()
            check_generates(lora.lora_name, info.head_task)
            self._adapters[key] = msgspec.structs.replace(lora, digest=info.digest)
            if info.language:
                self._languages[info.digest] = self._read_language(self._adapters[key])
            elif info.vocab_size is not None or info.context_length is not None:
                vocabulary = None
                if info.vocab_size is not None:
                    ends = self._engine.hello.ends(self.tokenizer.eos_token_id)
                    vocabulary = Vocabulary(info.vocab_size, ends)
                self._languages[info.digest] = Language(self.tokenizer, vocabulary, context_length=info.context_length)
        return self._adapters[key]

    def _read_language(self, lora: LoRARequest) -> Language:
        hello = self._engine.hello
        reader = LanguageReader(
            self.tokenizer,
            hello.vocab_size,
            hello.ends(self.tokenizer.eos_token_id),
            self._templates,
            self._encoders,
            rope_positions=hello.rope_positions,
        )
        store = AdapterStore(self._sources)
        try:
            return store.read(lora.lora_path, lora.digest, reader.read)
        finally:
            store.stop()

    def _submit(
        self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None, pending: dict[str, _Pending]
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        language = self._languages.get(lora.digest) if lora is not None else None
        tokenizer = self.tokenizer if language is None else language.tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        number = next(self._ids)
        result = RequestOutput(str(number), text, ids, [], lora_request=lora)
        vocabulary = None if language is None else language.vocabulary
        if params.bad_words:
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in spellings(params.bad_words)]
            params = msgspec.structs.replace(params, bad_words_token_ids=token_sequences(encoded))
        shape = self._engine.hello.routed
        for i in range(params.n):
            sample_params = params.of_sample(i)
            request_id = f"{number}-{i}"
            self._engine.add(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=ids,
                    params=sample_params,
                    lora=lora,
                    vocabulary=vocabulary,
                    base_eos_id=self.tokenizer.eos_token_id,
                    language="" if language is None else language.digest,
                    context_length=None if language is None else language.context_length,
                    returns_experts=shape is not None,
                    tokenizer=None if sample_params.structured_outputs is None else self._tokenizer_files.of(tokenizer),
                )
            )
            result.outputs.append(CompletionOutput(i))
            processor = OutputProcessor(tokenizer, ids, sample_params)
            pending[request_id] = _Pending(
                result, result.outputs[-1], processor, None if shape is None else RoutedAnswer(shape)
            )
        return result

    def _deliver(self, output: TokenOutput, pending: dict[str, _Pending]) -> None:
        entry = pending[output.request_id]
        if output.error is not None:
            raise from_wire(output.error)
        delta = entry.processor.push(output)
        if entry.routed is not None:
            entry.routed.received += output.routed_experts
        result, completion = entry.result, entry.completion
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or ()), *delta.logprobs]
            completion.cumulative_logprob = sum(entry.logprob for entry in completion.logprobs)
        result.prompt_logprobs = delta.prompt_logprobs or result.prompt_logprobs
        result.num_cached_tokens = max(result.num_cached_tokens, delta.num_cached_tokens)
        result.fallback_reason = delta.fallback_reason or result.fallback_reason
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            if entry.routed is not None:
                completion.routed_experts = entry.routed.rows(
                    len(result.prompt_token_ids) + entry.processor.num_tokens - 1
                )
            del pending[output.request_id]
            if output.finish_reason is None:
                self._engine.abort(output.request_id)


def _lora_config(options: LLMOptions, given: Mapping[str, Any]) -> LoRAConfig | None:
    """Returns the configuration of adapters, or None without them. `given` has the caller's arguments, of which None
    stands for the default."""
    fields = {name: given[name] for name in options_of(LoRAOptions) if given.get(name) is not None}
    if not options.enable_lora:
        if fields or options.lora_config is not None:
            raise ConfigError(f"{', '.join(fields) or 'lora_config'} has no effect without enable_lora=True; set it.")
        return None
    if options.lora_config is not None:
        if fields:
            raise ConfigError(f"{', '.join(fields)} cannot be given together with lora_config; set it there instead.")
        return options.lora_config
    return LoRAConfig(**fields)


def _entry_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one per prompt.", name)
    return list(value)

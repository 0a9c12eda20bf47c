"""Checks the requests that reach an engine, and turns each into a sequence."""

from __future__ import annotations

import random

from lorafleet.protocol.errors import AdapterChanged, ContextOverflow, InvalidRequest
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import HEADS, EngineHello, EngineRequest, SequenceTimes
from lorafleet.protocol.sampling_params import check_token_ids
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.schedule.routed_rows import RoutedRows
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager


class RequestIntake:
    """The intake of one engine. `seed` is for the requests that have none of their own."""

    def __init__(self, hello: EngineHello, base: BaseIdentity, loras: WorkerLoRAManager | None, seed: int) -> None:
        self._hello = hello
        self._base = base
        self._loras = loras
        self._seeds = random.Random(seed)

    def eos_token_ids(self, request: EngineRequest) -> list[int]:
        if request.vocabulary is not None:
            return request.vocabulary.eos_token_ids
        return self._hello.ends(request.base_eos_id)

    def make_sequence(self, request: EngineRequest) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        room = self._hello.context_limit(request.context_length) - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return Sequence(
            request_id=request.request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            lora=request.lora,
            prompt_logprobs=[] if params.prompt_logprobs is not None else None,
            stop_ids=self._stop_ids(request),
            needs_adapter=request.vocabulary is not None
            or request.pooling in HEADS
            or request.version_demand != "any"
            or len(prompt) + max_tokens > self._hello.max_model_len,
            vocab_size=self._vocab_size(request),
            priority=request.priority,
            pooling=request.pooling,
            cache_salt=request.cache_salt,
            base=self._base,
            tenant=request.tenant,
            language=request.language,
            context_length=request.context_length,
            version_demand=request.version_demand,
            times=SequenceTimes() if request.traced else None,
            routed=RoutedRows() if request.returns_experts else None,
        )

    def check(self, request: EngineRequest) -> None:
        """Raises LorafleetError if the request can never be served."""
        vocab_size = self._vocab_size(request)
        self._check_prompt(request, vocab_size)
        if request.pooling is None and not self._hello.can_generate:
            raise InvalidRequest(
                "the base model's checkpoint has no lm_head.weight, so it cannot generate. Request embeddings, or "
                "serve a checkpoint with a head.",
                "model",
            )
        assert not request.params.bad_words or request.params.bad_words_token_ids is not None
        assert not request.returns_experts or self._hello.routed is not None
        request.params.check_vocabulary(vocab_size)
        request.params.check_choice(self._stop_ids(request), vocab_size)
        if request.vocabulary is not None:
            check_token_ids("eos_token_id", request.vocabulary.eos_token_ids, vocab_size)
        if request.lora is not None and self._loras is None:
            raise InvalidRequest("this server runs without LoRA; start it with --enable-lora.", "model")
        assert request.lora is None or request.lora.digest, "adapters are read once before they are requested"
        self._check_language(request, vocab_size)

    def _stop_ids(self, request: EngineRequest) -> frozenset[int]:
        eos_token_ids = () if request.params.ignore_eos else self.eos_token_ids(request)
        return frozenset(eos_token_ids) | frozenset(request.params.stop_token_ids or ())

    def _check_prompt(self, request: EngineRequest, vocab_size: int) -> None:
        prompt, limit = request.prompt_token_ids, self._hello.context_limit(request.context_length)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; it must have at least one.", "prompt")
        if len(prompt) >= limit:
            name = "this server" if request.lora is None else f"adapter {request.lora.lora_name!r}"
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens; the limit of {name} for prompt and answer together is "
                f"{limit}. Shorten the prompt to at most {limit - 1} tokens, or raise max_model_len.",
                "prompt",
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < vocab_size)
            raise InvalidRequest(
                f"the prompt has token id {wrong}; this model's vocabulary has ids 0 to {vocab_size - 1}.", "prompt"
            )

    def _check_language(self, request: EngineRequest, vocab_size: int) -> None:
        """Raises AdapterChanged if the tokenizer or the context length in the adapter's folder has changed since the
        adapter was loaded.

        The front end reads both by itself. An adapter that is still to be loaded has its digest checked then.
        A mix is not checked, since it has its parts' tokenizers.
        """
        if request.lora is None or request.lora.parts or self._loras is None:
            return
        info = self._loras.info(request.lora.digest)
        if info is None:
            return
        loaded = info.language, info.vocab_size or self._hello.vocab_size, info.context_length
        if loaded == (request.language, vocab_size, request.context_length):
            return
        raise AdapterChanged(
            f"adapter {request.lora.lora_name!r}: the tokenizer files or the context length in its folder have changed "
            "since it was loaded. Load it again (load_inplace) to serve the new version."
        )

    def check_switch(self, sequence: Sequence, lora: LoRARequest) -> None:
        """Raises AdapterChanged if a sequence cannot go on with another version of its adapter: its prompt was
        tokenized for the former one, or the new one does not generate."""
        info = None if self._loras is None else self._loras.info(lora.digest)
        if info is None:
            raise AdapterChanged(
                f"adapter {lora.lora_name!r}: the new version is not loaded here. Send the request again."
            )
        new = info.language, info.vocab_size or self._hello.vocab_size, info.context_length
        if info.head_task or new != (sequence.language, sequence.vocab_size, sequence.context_length):
            raise AdapterChanged(
                f"adapter {lora.lora_name!r}: a new version with a classification head, or with another tokenizer or "
                "context length, was pushed while this request ran, and the push lets no request end with the former "
                "version. Send the request again."
            )

    def _vocab_size(self, request: EngineRequest) -> int:
        return self._hello.vocab_size if request.vocabulary is None else request.vocabulary.size

"""Checks the requests that reach an engine, and turns each into a sequence."""

from __future__ import annotations

import random

from lorafleet.protocol.errors import AdapterChanged, ContextOverflow, InvalidRequest
from lorafleet.protocol.messages import EngineHello, EngineRequest, SequenceTimes
from lorafleet.protocol.sampling_params import check_token_ids
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager


class RequestIntake:
    """The intake of one engine. `seed` is for the requests that have none of their own."""

    def __init__(self, hello: EngineHello, loras: WorkerLoRAManager | None, seed: int) -> None:
        self._hello = hello
        self._loras = loras
        self._seeds = random.Random(seed)

    def eos_token_ids(self, request: EngineRequest) -> list[int]:
        return self._hello.eos_token_ids if request.vocabulary is None else request.vocabulary.eos_token_ids

    def make_sequence(self, request: EngineRequest) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        room = self._hello.max_model_len - len(prompt)
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids(request)
        return Sequence(
            request_id=request.request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            lora=request.lora,
            prompt_logprobs=[] if params.prompt_logprobs is not None else None,
            stop_ids=frozenset(eos_token_ids) | frozenset(params.stop_token_ids or ()),
            own_vocabulary=request.vocabulary is not None,
            vocab_size=self._vocab_size(request),
            priority=request.priority,
            pooling=request.pooling,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            times=SequenceTimes() if request.traced else None,
        )

    def check(self, request: EngineRequest) -> None:
        """Raises LorafleetError if the request can never be served."""
        vocab_size = self._vocab_size(request)
        self._check_prompt(request.prompt_token_ids, vocab_size)
        request.params.check_vocabulary(vocab_size)
        if request.vocabulary is not None:
            check_token_ids("eos_token_id", request.vocabulary.eos_token_ids, vocab_size)
        if request.lora is not None and self._loras is None:
            raise InvalidRequest("this server runs without LoRA; start it with --enable-lora.", "model")
        assert request.lora is None or request.lora.digest, "adapters are read once before they are requested"
        self._check_language(request, vocab_size)

    def _check_prompt(self, prompt: list[int], vocab_size: int) -> None:
        limit = self._hello.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; it must have at least one.", "prompt")
        if len(prompt) >= limit:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens; this server's limit for prompt and answer together is "
                f"{limit}. Shorten the prompt to at most {limit - 1} tokens, or raise max_model_len.",
                "prompt",
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < vocab_size)
            raise InvalidRequest(
                f"the prompt has token id {wrong}; this model's vocabulary has ids 0 to {vocab_size - 1}.", "prompt"
            )

    def _check_language(self, request: EngineRequest, vocab_size: int) -> None:
        """Raises AdapterChanged if the tokenizer in the adapter's folder has changed since the adapter was loaded.

        The front end reads the tokenizer by itself. An adapter that is still to be loaded has its digest checked then.
        A mix is not checked, since it has its parts' tokenizers.
        """
        if request.lora is None or request.lora.parts or self._loras is None:
            return
        info = self._loras.info(request.lora.digest)
        if info is None or (info.language, info.vocab_size or self._hello.vocab_size) == (request.language, vocab_size):
            return
        raise AdapterChanged(
            f"adapter {request.lora.lora_name!r}: the tokenizer files in its folder have changed since it was "
            "loaded. Load it again (load_inplace) to serve the new version."
        )

    def _vocab_size(self, request: EngineRequest) -> int:
        return self._hello.vocab_size if request.vocabulary is None else request.vocabulary.size

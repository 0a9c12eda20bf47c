"""What a caller may ask of sampling: names, defaults and bounds. The arithmetic is in workers/sampler.py."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.random_numbers import child_seed
from lorafleet.workers.structured.spec import StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_N = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's SamplingParams, as far as this engine honours them; an unknown name is a TypeError.

    top_k: 0 or -1 considers every token. seed: the same seed, prompt and adapter give the same tokens whatever else
    is in the batch. stop: the text ends before the first of them. max_tokens: None means up to the context's end.
    logprobs: k asks for the sampled token's logprob and the k best, of the raw model distribution (before penalties
    and temperature, as in vLLM and transformers). prompt_logprobs: the same for each prompt token but the first.
    structured_outputs: what the whole answer must match (workers/structured/spec.py).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _between("n", self.n, 1, MAX_N)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, -1, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}; lower it or raise max_tokens.",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 0, MAX_LOGPROBS)
        _check_stop_strings(self.stop_strings)
        if self.structured_outputs is not None and self.min_tokens:
            # A grammar may leave nothing but the end of the answer.
            raise InvalidRequest("`min_tokens` cannot be kept beside structured output; leave it out.", "min_tokens")
        for token, bias in (self.logit_bias or {}).items():
            _between(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def edits_logits(self) -> bool:
        """Whether biases or penalties may change the logits."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def of_sample(self, sample: int) -> SamplingParams:
        """The parameters of one of `n` samples: each has a seed of its own, mixed from the request's and its index."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else child_seed(self.seed, sample)
        return msgspec.structs.replace(self, n=1, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest where a token id named here does not exist."""
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest where one of the ids of the field `name` does not exist."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name} names token {token}; this model's vocabulary has ids 0 to {vocab_size - 1}.", name
            )


def _check_stop_strings(stops: list[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS}.", "stop")
    if any(not stop for stop in stops):
        raise InvalidRequest("stop has an empty string, which would end every answer at once; remove it.", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS}. Shorten it.", "stop"
        )


def _between(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name}={value} is out of range; it must be in {bracket}{low}, {high}].", param or name)

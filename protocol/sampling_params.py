"""The sampling parameters of a request: names, defaults and bounds. The arithmetic is in workers/device/sampler.py."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import get_args

import msgspec

from lorafleet.protocol import limits
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import LogprobsMode, shown_number
from lorafleet.protocol.random_numbers import child_seed
from lorafleet.protocol.structured_spec import StructuredOutputs


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's SamplingParams, as far as this engine honors them. An unknown name is a TypeError."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 considers every token.
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None  # No other token can be chosen, not even one that ends the answer.
    # Words that the answer does not contain: the last token of each of their spellings has no chance.
    bad_words: list[str] | None = None
    # bad_words in token ids (api/text/bad_words.py). Set by the HTTP front and by LLM, which have the tokenizer.
    bad_words_token_ids: list[list[int]] | None = None
    seed: int | None = None  # The same seed, prompt and adapter give the same tokens, whatever else is in the batch.
    stop: str | list[str] | None = None  # The text ends before the first of them.
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the end of the context.
    min_tokens: int = 0
    logprobs: int | None = None  # k returns the logprob of the sampled token and of the k best.
    logprobs_mode: LogprobsMode | None = None  # None: the server's.
    # The same for each prompt token but the first, always of the model's own probabilities.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    # Format that the whole answer must match (protocol/structured_spec.py).
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name, bounds in limits.SAMPLING.items():
            value = getattr(self, name)
            if value is not None:
                bounds.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it or raise max_tokens.",
                "min_tokens",
            )
        if self.structured_outputs is not None and self.min_tokens:
            # A grammar may allow nothing but the end of the answer.
            raise InvalidRequest("`min_tokens` is not supported with structured output; leave it out.", "min_tokens")
        if self.logprobs_mode not in (None, *get_args(LogprobsMode)):
            raise InvalidRequest(
                f"logprobs_mode={limits.cut(repr(self.logprobs_mode))} is unknown; use one of "
                f"{', '.join(get_args(LogprobsMode))}.",
                "logprobs_mode",
            )
        self._check_stops()
        self._check_lists()
        _check_count("logit_bias", self.logit_bias, limits.MAX_LOGIT_BIAS)
        for token, bias in (self.logit_bias or {}).items():
            limits.LOGIT_BIAS.check(f"logit_bias[{shown_number(token)}]", bias, param="logit_bias")

    def _check_stops(self) -> None:
        _check_count("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        _check_count("stop", self.stop_strings, limits.MAX_STOP_STRINGS)
        for text in self.stop_strings:
            if not text:
                raise InvalidRequest(
                    "stop has an empty string, which would end every answer at once; remove it.", "stop"
                )
            if len(text) > limits.MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"stop has a string of {len(text)} characters; at most {limits.MAX_STOP_CHARS} are allowed. "
                    "Shorten it.",
                    "stop",
                )

    def _check_lists(self) -> None:
        _check_count("allowed_token_ids", self.allowed_token_ids, limits.MAX_ALLOWED_TOKEN_IDS)
        _check_count("bad_words", self.bad_words, limits.MAX_BAD_WORDS)
        if self.allowed_token_ids == []:
            raise InvalidRequest(
                "allowed_token_ids is empty, which would allow no answer; leave it out to allow every token.",
                "allowed_token_ids",
            )
        for word in self.bad_words or ():
            if not word.strip():
                raise InvalidRequest("bad_words has a word without letters; remove it.", "bad_words")
            if len(word) > limits.MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"bad_words has a word of {len(word)} characters; at most {limits.MAX_BAD_WORD_CHARS} are allowed. "
                    "Shorten it.",
                    "bad_words",
                )
        for name in ("allowed_token_ids", "bad_words"):
            if self.structured_outputs is not None and getattr(self, name):
                # A grammar may allow nothing but the tokens that this forbids.
                raise InvalidRequest(
                    f"`{name}` is not supported with structured output or forced tool calls; leave it out, and exclude "
                    "the words by the schema or grammar.",
                    name,
                )

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def edits_logits(self) -> bool:
        """Whether biases, penalties, or lists of allowed or banned tokens may change the logits."""
        lists = self.allowed_token_ids or self.bad_words_token_ids
        return bool(self.logit_bias or self.min_tokens or self.penalizes or lists)

    @property
    def num_listed_ids(self) -> int:
        """Number of the token ids in all lists, which the engine gets once for each sequence."""
        listed = (self.allowed_token_ids, self.stop_token_ids, self.logit_bias, *(self.bad_words_token_ids or ()))
        return sum(len(ids or ()) for ids in listed)

    @property
    def num_chars(self) -> int:
        """Number of characters of the texts, which the engine gets once for each sequence."""
        source = "" if self.structured_outputs is None else self.structured_outputs.source
        return len(source) + sum(map(len, self.stop_strings)) + sum(map(len, self.bad_words or ()))

    @property
    def penalizes(self) -> bool:
        """Whether the logits depend on the previous tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def of_sample(self, sample: int) -> SamplingParams:
        """Returns the parameters of one of `n` samples. Each sample has its own seed, mixed from the request's seed
        and its index."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else child_seed(self.seed, sample)
        return msgspec.structs.replace(self, n=1, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id in these parameters does not exist, or bad_words have too many tokens."""
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        banned = self.bad_words_token_ids or ()
        for tokens in banned:
            check_token_ids("bad_words", tokens, vocab_size)
        num_banned = sum(map(len, banned))
        if num_banned > limits.MAX_BAD_WORDS_TOKENS:
            raise InvalidRequest(
                f"the words of bad_words have {num_banned} tokens in all of their spellings; at most "
                f"{limits.MAX_BAD_WORDS_TOKENS} are allowed. Ban fewer or shorter words.",
                "bad_words",
            )

    def check_choice(self, stop_ids: Iterable[int], vocab_size: int) -> None:
        """Raises InvalidRequest if the lists of tokens could leave none to choose. `stop_ids` end the answer, and have
        no chance before min_tokens."""
        if not self.allowed_token_ids and not self.bad_words_token_ids:
            return
        forbidden = {tokens[-1] for tokens in self.bad_words_token_ids or ()}
        if self.min_tokens:
            forbidden |= set(stop_ids)
        num_left = vocab_size - len(forbidden)
        if self.allowed_token_ids:
            num_left = len(set(self.allowed_token_ids) - forbidden)
        if num_left < 1:
            name = "allowed_token_ids" if self.allowed_token_ids else "bad_words"
            raise InvalidRequest(
                f"{name} could leave no token to choose: the rest is banned by bad_words, or ends the answer before "
                "min_tokens. Allow more tokens, or lower min_tokens.",
                name,
            )


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest if one of the ids of the field `name` does not exist."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name} has the token id {shown_number(token)}; this model's vocabulary has ids 0 to "
                f"{vocab_size - 1}.",
                name,
            )


def _check_count(name: str, given: Sized | None, most: int) -> None:
    if given is not None and len(given) > most:
        raise InvalidRequest(f"{name} has {len(given)} entries; at most {most} are allowed.", name)

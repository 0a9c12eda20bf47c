"""Writes logprobs in the formats of OpenAI's two endpoints and of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from lorafleet.api.answer.encoded_list import EncodedList
from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.output import Delta
from lorafleet.api.text.token_table import TokenTable
from lorafleet.protocol.messages import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity; OpenAI and vLLM write this instead.


def count_logprobs(delta: Delta) -> int:
    """Returns the number of logprobs in the delta, including those of the prompt."""
    own, prompt = delta.logprobs, delta.prompt_logprobs
    num_own = len(own) * (1 + _width(next(iter(own)))) if own else 0
    return num_own + (len(prompt) * (1 + _width(prompt[-1])) if prompt else 0)


def _width(entry: TokenLogprobs | None) -> int:
    return 0 if entry is None else len(entry.top_ids)


def token_string(tokenizer: TokenTable, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def completion_logprobs(
    tokenizer: TokenTable, entries: Iterable[TokenLogprobs | None], offsets: Sequence[int], *, first: int, as_ids: bool
) -> dict[str, object]:
    """Returns four parallel lists. `first` is the ID of the first prompt token, whose entry may be None."""
    tokens, logprobs, best = list[str](), list[float | None](), EncodedList()
    for entry in entries:
        tokens.append(token_string(tokenizer, entry.token_id if entry else first, as_ids))
        logprobs.append(max(entry.logprob, LOWEST) if entry else None)
        best.append(_best_by_text(tokenizer, entry, as_ids) if entry else None)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": best.encoded,
        "text_offset": list(offsets),
    }


def _best_by_text(tokenizer: TokenTable, entry: TokenLogprobs, as_ids: bool) -> dict[str, float]:
    """Returns the logprobs of the k best tokens and the token itself. Of tokens with equal texts, the best counts."""
    best: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        best.setdefault(token_string(tokenizer, token_id, as_ids), max(logprob, LOWEST))
    best.setdefault(token_string(tokenizer, entry.token_id, as_ids), max(entry.logprob, LOWEST))
    return best


def chat_logprobs(tokenizer: TokenTable, entries: Iterable[TokenLogprobs], *, as_ids: bool) -> dict[str, object]:
    return {"content": logprob_entries(tokenizer, entries, as_ids=as_ids), "refusal": None}


def logprob_entries(tokenizer: TokenTable, entries: Iterable[TokenLogprobs], *, as_ids: bool) -> list[msgspec.Raw]:
    """Returns the entries, each encoded separately, because together they may have millions of values."""
    return [msgspec.Raw(msgspec.json.encode(_chat_entry(tokenizer, entry, as_ids))) for entry in entries]


def _chat_entry(tokenizer: TokenTable, entry: TokenLogprobs, as_ids: bool) -> dict[str, object]:
    best = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **_chat_token(tokenizer, entry.token_id, entry.logprob, as_ids),
        "top_logprobs": [_chat_token(tokenizer, token_id, logprob, as_ids) for token_id, logprob in best],
    }


def _chat_token(tokenizer: TokenTable, token_id: int, logprob: float, as_ids: bool) -> dict[str, object]:
    return {
        "token": token_string(tokenizer, token_id, as_ids),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def vllm_prompt_logprobs(tokenizer: TokenTable, entries: Sequence[TokenLogprobs | None]) -> msgspec.Raw:
    """Returns for each prompt token the k best tokens and the token itself, by ID. The first entry may be null."""
    return EncodedList(_by_id(tokenizer, entry) if entry else None for entry in entries).encoded


def _by_id(tokenizer: TokenTable, entry: TokenLogprobs) -> dict[str, object]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for i, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True)):
        ranked.setdefault(token_id, (logprob, i + 1))
    return {
        str(token_id): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


def prompt_offsets(tokenizer: TokenTable, token_ids: Sequence[int], text_length: int) -> list[int]:
    """Returns the offset in characters at which each prompt token's text begins."""
    offsets, position = [], 0
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=True)
    for token_id in token_ids:
        offsets.append(min(position, text_length))
        position += len(detokenizer.push(token_id))
    return offsets

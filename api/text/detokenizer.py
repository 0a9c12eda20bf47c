"""Turns tokens into text one at a time: the pieces always join to the full decode, and no piece ends inside a
character. Knows nothing of stop strings or logprobs: api/text/output.py.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from lorafleet.api.text.token_table import TokenTable

_REPLACEMENT = "\ufffd"
_MAX_TEXTLESS_TOKENS = 32  # after which a window moves on; a character has 4 bytes, each of them a token at most
_CONTEXT_TOKENS = 5  # of the prompt, decoded along so that a leading space survives; transformers and vLLM use 5 too


class Detokenizer(Protocol):
    @property
    def pending(self) -> bool:
        """A character has begun and is not complete."""
        ...

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete."""
        ...


def make_detokenizer(tokenizer: TokenTable, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer.byte_table(skip_special_tokens=skip_special_tokens))
    return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For byte-level BPE (Llama 3, Qwen, GPT-2): a token is its bytes, whatever stands before it."""

    __slots__ = ("_rest", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._rest = b""

    @property
    def pending(self) -> bool:
        return bool(self._rest)

    def push(self, token_id: int) -> str:
        if token_id >= len(self._table):
            return ""
        raw = self._rest + self._table[token_id]
        text, used = utf_8_decode(raw, "replace", False)
        self._rest = raw[used:]
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text


class WindowDetokenizer:
    """For every other kind (sentencepiece with byte fallback, …), whose text of a token depends on its neighbours.

    Decodes a window from the last piece but one and gives what lies beyond the part already given. The window holds 64
    tokens at most, so that an answer's work is linear in its tokens: tokens without a text stay out of it,
    and bytes that complete no character are given as U+FFFD.
    Source: text-generation-inference's decode_token.
    """

    __slots__ = ("_given", "_read", "_skip_special", "_tokenizer", "_window", "pending")

    def __init__(self, tokenizer: TokenTable, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = [one for one in prompt_ids[-_CONTEXT_TOKENS:] if self._has_text(one)]
        self._read = len(self._window)
        # A prompt that ends inside a character: the answer completes it, so the whole character is the answer's.
        self._given = self._decode(self._window).rstrip(_REPLACEMENT)
        self.pending = False

    def push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self.pending = text.endswith(_REPLACEMENT) and len(text) > len(self._given)
        must_wait = self.pending or len(text) <= len(self._given)
        if must_wait and len(self._window) - self._read < _MAX_TEXTLESS_TOKENS:
            return ""
        self.pending = False
        return self._advance(text)

    def finish(self) -> str:
        self.pending = False
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._given) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._given = self._decode(self._window)
        return piece

    def _has_text(self, token_id: int) -> bool:
        """Decoding passes over other tokens: they do not even part their neighbours."""
        is_skipped = self._skip_special and token_id in self._tokenizer.special_ids
        return 0 <= token_id < self._tokenizer.vocab_size and not is_skipped

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

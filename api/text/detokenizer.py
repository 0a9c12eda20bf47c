"""Turns tokens into text one at a time. The pieces always join to the full decode, and no piece ends inside a
character.

Stop strings and logprobs are handled in api/text/output.py.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from lorafleet.api.text.token_table import TokenTable

_REPLACEMENT = "\ufffd"
_MAX_TEXTLESS_TOKENS = 32  # then the window moves on; a character takes at most 4 tokens, one per byte
# Prompt tokens that are decoded too, so that a leading space survives; transformers and vLLM also use 5.
_CONTEXT_TOKENS = 5


class Detokenizer(Protocol):
    @property
    def pending(self) -> bool:
        """Whether a character has begun and is not complete."""
        ...

    def push(self, token_id: int) -> str:
        """Returns the characters that this token completes."""
        ...

    def finish(self) -> str:
        """Returns the remaining text: U+FFFD for a character that never became complete."""
        ...


def make_detokenizer(tokenizer: TokenTable, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer.byte_table(skip_special_tokens=skip_special_tokens))
    return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """A detokenizer for byte-level BPE (Llama 3, Qwen, GPT-2), in which a token stands for its bytes in every
    context."""

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
    """A detokenizer for all other kinds (sentencepiece with byte fallback, …), in which a token's text depends on its
    neighbors.

    It decodes a window from the last piece but one, and returns the text beyond the part that it has already
    returned. The window holds 64 tokens at most, so an answer's work is linear in its tokens. Tokens without text are
    left out of the window, and bytes that complete no character are returned as U+FFFD.
    Source: text-generation-inference's decode_token.
    """

    __slots__ = ("_given", "_read", "_skip_special", "_tokenizer", "_window", "pending")

    def __init__(self, tokenizer: TokenTable, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = [token_id for token_id in prompt_ids[-_CONTEXT_TOKENS:] if self._has_text(token_id)]
        self._read = len(self._window)
        # If the prompt ends inside a character, the answer completes it and gets the whole character.
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
        """Returns whether decoding uses the token. It skips all others, which do not even separate their neighbors."""
        is_skipped = self._skip_special and token_id in self._tokenizer.special_ids
        return 0 <= token_id < self._tokenizer.vocab_size and not is_skipped

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

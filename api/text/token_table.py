"""Tables of one tokenizer's tokens by id: their names, their bytes, and which of them are special.

Plain tables cannot be slow. Text is encoded by api/text/tokenizer.py for the base model's tokenizer, and by
api/text/tokenizers.py for those of adapters.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenFacts:
    names: list[str]  # By id, in the vocabulary's spelling, such as `Ġhello`; "" if there is no such token.
    token_bytes: list[bytes]  # By id: the bytes that the token adds to the text.
    special_ids: frozenset[int]
    is_byte_level: bool  # Whether a token stands for its bytes in every context.
    most_characters: int | None  # Most characters of a text that one token can stand for; None if there is no bound.
    special_tokens: Mapping[str, str]  # By role, such as "eos_token".
    eos_token_id: int | None


class TokenTable(ABC):
    def __init__(self, facts: TokenFacts) -> None:
        self.vocab_size = len(facts.names)  # ids that the tokenizer knows; the model's vocabulary may be padded
        self.eos_token_id = facts.eos_token_id
        self.special_tokens = facts.special_tokens
        self.special_ids = facts.special_ids
        self.special_texts = {facts.names[i]: i for i in sorted(facts.special_ids)}
        self.is_byte_level = facts.is_byte_level
        self._names = facts.names
        self._bytes = facts.token_bytes
        self._visible_bytes = [b"" if i in facts.special_ids else b for i, b in enumerate(facts.token_bytes)]
        self._most_characters = facts.most_characters
        self._ids: dict[str, int | None] = {}

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes the ids; skips those that the tokenizer does not know."""

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound of the number of tokens at no cost, so that a text far over the context need not be
        tokenized."""
        return 0 if self._most_characters is None else len(text) // self._most_characters

    def byte_table(self, *, skip_special_tokens: bool) -> list[bytes]:
        """Returns the bytes of every token by id. They are exact for byte-level tokenizers only."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text, even if it is only half of a UTF-8 character."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """Returns OpenAI's spelling of one token: its text, or `bytes:\\xe2\\x82` if it is no whole character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def id_of(self, tag: str) -> int | None:
        """Returns the token that stands for exactly this text, or None. The result is cached, so `tag` is a constant of
        the program and not a client's text."""
        if tag not in self._ids:
            letters = tag.encode()
            self._ids[tag] = self._bytes.index(letters) if letters in self._bytes else None
        return self._ids[tag]

    def id_by_name(self, name: str) -> int | None:
        """Returns the token with this name in the vocabulary's own spelling, or None. Compares every name."""
        return next((token for token, known in enumerate(self._names) if known == name), None)

    def token_name(self, token_id: int) -> str:
        """Returns the vocabulary's own spelling, such as `Ġhello`."""
        return self._names[token_id] if 0 <= token_id < self.vocab_size else ""


def bytes_of(name: str, *, is_byte_level: bool) -> bytes:
    """Returns the bytes that a token of this name adds to the text."""
    if is_byte_level:
        # The library takes a token with any foreign character literally; this is common for added tokens.
        codes = [_BYTE_OF_CHAR.get(char) for char in name]
        return name.encode() if None in codes else bytes(code for code in codes if code is not None)
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()


def char_of_byte(byte: int) -> str:
    """Returns the character that stands for the byte in the names of byte-level tokens."""
    return _CHAR_OF_BYTE[byte]


def most_characters(token_bytes: Sequence[bytes], normalizer: str | None, *, is_byte_level: bool) -> int | None:
    """Returns the most characters that one token can stand for. `normalizer` is the type of the normalizer.

    Returns None if the tokenizer may drop characters, because there is no bound then.
    """
    if not is_byte_level or normalizer not in (None, "NFC"):
        return None
    longest = max(map(len, token_bytes), default=1) or 1
    return longest if normalizer is None else 3 * longest  # NFC combines at most three characters into one


def cutting_rules(backend: Any) -> str:
    """Returns a digest of the rules by which a library tokenizer splits texts before it uses its vocabulary.

    It covers every part that may contain regular expressions.
    """
    parts = (backend.normalizer, backend.pre_tokenizer)
    states = [b"" if part is None else bytes(part.__getstate__()) for part in parts]
    return hashlib.sha256(b"\0".join(states)).hexdigest()


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet, which maps every byte to a printable character. Source: openai/gpt-2, encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}

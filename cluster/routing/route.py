"""What a router reads in a request's body, which may have been cut off. Nothing but the choice depends on it."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from lorafleet.cluster.routing.model_name import find_adapter

BYTES_PER_TOKEN = 4  # of English text
PREFIX_BYTES = 2048
PREFIX_TOKENS = PREFIX_BYTES // BYTES_PER_TOKEN
PROMPT_BYTES = 4096  # A prompt that begins later in the body has no prefix.

_SESSION = "lorafleet-route"
_PROMPT = re.compile(rb'"(?:messages|prompt|text)"\s*:')


@dataclass(frozen=True, slots=True)
class Route:
    """name: of the adapter, or "". num_tokens: about so many. prefix: of how the prompt begins, where it is long."""

    name: str = ""
    num_tokens: int = 0
    prefix: int | None = None

    def to_session(self) -> str:
        """As one text, which a router takes in place of the body."""
        return f"{_SESSION} {self.num_tokens} {'-' if self.prefix is None else self.prefix} {self.name}"


NO_ROUTE = Route()


def read_route(body: bytes, num_bytes: int | None = None) -> Route:
    """num_bytes: the size of the whole body, where only its beginning, or both its ends, are here."""
    num_tokens = (len(body) if num_bytes is None else num_bytes) // BYTES_PER_TOKEN
    return Route(find_adapter(body), num_tokens, _prefix(body))


def route_of_session(text: str) -> Route:
    """NO_ROUTE for a text that to_session() has not made: clients may send sessions of their own."""
    match text.split(" ", 3):
        case [kind, tokens, prefix, name] if kind == _SESSION and tokens.isdecimal():
            return Route(name, int(tokens), int(prefix) if prefix.isdecimal() else None)
    return NO_ROUTE


def _prefix(body: bytes) -> int | None:
    """Of raw bytes: equal prompts that are written differently are taken for different ones."""
    prompt = _PROMPT.search(body, 0, PROMPT_BYTES)
    if prompt is None or len(body) - prompt.end() < PREFIX_BYTES:
        return None
    return zlib.crc32(body[prompt.end() : prompt.end() + PREFIX_BYTES])

"""Reads what a router needs from a request's body, which may be cut off. Only the choice of a replica depends on it."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from lorafleet.cluster.routing.model_name import find_adapter

BYTES_PER_TOKEN = 4  # In English text.
PREFIX_BYTES = 2048
PREFIX_TOKENS = PREFIX_BYTES // BYTES_PER_TOKEN
PROMPT_BYTES = 4096  # A prompt that begins later in the body gets no prefix.

_SESSION = "lorafleet-route"
_PROMPT = re.compile(rb'"(?:messages|prompt|text)"\s*:')


@dataclass(frozen=True, slots=True)
class Route:
    """The properties of a request by which a router chooses a replica."""

    name: str = ""  # The adapter's name, or "" if there is none.
    num_tokens: int = 0  # Approximate size of the request.
    prefix: int | None = None  # Hash of the beginning of the prompt, if the prompt is long.

    def to_session(self) -> str:
        """Returns the route as text, which a router accepts in place of the body."""
        return f"{_SESSION} {self.num_tokens} {'-' if self.prefix is None else self.prefix} {self.name}"


NO_ROUTE = Route()


def read_route(body: bytes, num_bytes: int | None = None) -> Route:
    """Reads the route from a body. `num_bytes` is the size of the whole body if only its beginning, or its two ends,
    are given."""
    num_tokens = (len(body) if num_bytes is None else num_bytes) // BYTES_PER_TOKEN
    return Route(find_adapter(body), num_tokens, _prefix(body))


def route_of_session(text: str) -> Route:
    """Parses the text of to_session(). Returns NO_ROUTE for other texts, since clients may send sessions of their
    own."""
    match text.split(" ", 3):
        case [kind, tokens, prefix, name] if kind == _SESSION and tokens.isdecimal():
            return Route(name, int(tokens), int(prefix) if prefix.isdecimal() else None)
    return NO_ROUTE


def _prefix(body: bytes) -> int | None:
    """Returns a hash of the prompt's beginning, or None if the prompt is short. It hashes raw bytes, so equal
    prompts that are written differently count as different."""
    prompt = _PROMPT.search(body, 0, PROMPT_BYTES)
    if prompt is None or len(body) - prompt.end() < PREFIX_BYTES:
        return None
    return zlib.crc32(body[prompt.end() : prompt.end() + PREFIX_BYTES])

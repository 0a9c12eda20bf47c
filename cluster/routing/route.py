"""Reads what a router needs from a request's body, which may be cut off. Only the choice of a replica depends on it."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from lorafleet.cluster.routing.model_name import find_adapter

BYTES_PER_TOKEN = 4  # In English text.
# Lengths in bytes of the beginnings of a prompt that are compared: 1 KiB to 128 KiB, four for each power of two.
PREFIX_BYTES = tuple((4 + step % 4) << (8 + step // 4) for step in range(29))
PROMPT_BYTES = 4096  # A prompt that begins later in the body has no prefixes.

_SESSION = "lorafleet-route"
_NUMBER = re.compile("[0-9]{1,10}")
_PROMPT = re.compile(rb'"(?:messages|prompt|text)"\s*:')


@dataclass(frozen=True, slots=True)
class Route:
    """The properties of a request by which a router chooses a replica."""

    name: str = ""  # The adapter's name, or "" if there is none.
    num_tokens: int = 0  # Approximate size of the request.
    prefixes: tuple[int, ...] = ()  # Hashes of the prompt's first PREFIX_BYTES, as far as the prompt is as long.

    def to_session(self) -> str:
        """Returns the route as text, which a router accepts in place of the body."""
        return f"{_SESSION} {self.num_tokens} {','.join(map(str, self.prefixes)) or '-'} {self.name}"


def prefix_tokens(count: int) -> int:
    """Returns the approximate number of tokens in the longest of a prompt's first `count` prefixes."""
    return PREFIX_BYTES[count - 1] // BYTES_PER_TOKEN if count else 0


NO_ROUTE = Route()


def read_route(body: bytes, num_bytes: int | None = None) -> Route:
    """Reads the route from a body. `num_bytes` is the size of the whole body if only its beginning, or its two ends,
    are given."""
    is_whole = num_bytes in (None, len(body))
    num_tokens = (len(body) if num_bytes is None else num_bytes) // BYTES_PER_TOKEN
    return Route(find_adapter(body), num_tokens, _prefixes(body, len(body) if is_whole else len(body) // 2))


def route_of_session(text: str) -> Route:
    """Parses the text of to_session(). Returns NO_ROUTE for other texts, since clients may send sessions of their
    own."""
    match text.split(" ", 3):
        case [kind, tokens, prefixes, name] if kind == _SESSION and _NUMBER.fullmatch(tokens):
            hashes = [text for text in prefixes.split(",")[: len(PREFIX_BYTES)] if _NUMBER.fullmatch(text)]
            return Route(name, int(tokens), tuple(map(int, hashes)))
    return NO_ROUTE


def _prefixes(body: bytes, end: int) -> tuple[int, ...]:
    """Returns hashes of the prompt's beginnings that lie before `end`. They are of raw bytes, so equal prompts that are
    written differently count as different."""
    prompt = _PROMPT.search(body, 0, PROMPT_BYTES)
    if prompt is None:
        return ()
    view, begin, hashed, found = memoryview(body), prompt.end(), 0, []
    last = begin
    for length in PREFIX_BYTES:
        if begin + length > end:
            break
        hashed = zlib.crc32(view[last : begin + length], hashed)
        last = begin + length
        found.append(hashed)
    return tuple(found)

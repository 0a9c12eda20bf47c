"""What a router reads in a request's body, which may have been cut off. Nothing but the choice depends on it."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from lorafleet.cluster.model_name import find_adapter

BYTES_PER_TOKEN = 4  # of English text
PREFIX_BYTES = 2048
PREFIX_TOKENS = PREFIX_BYTES // BYTES_PER_TOKEN

_PROMPT = re.compile(rb'"(?:messages|prompt|text)"\s*:')


@dataclass(frozen=True, slots=True)
class Route:
    """name: of the adapter, or "". num_tokens: about so many. prefix: of how the prompt begins, where it is long."""

    name: str = ""
    num_tokens: int = 0
    prefix: int | None = None


NO_ROUTE = Route()


def read_route(body: bytes) -> Route:
    return Route(find_adapter(body), len(body) // BYTES_PER_TOKEN, _prefix(body))


def _prefix(body: bytes) -> int | None:
    """Of raw bytes: equal prompts that are written differently are taken for different ones."""
    prompt = _PROMPT.search(body)
    if prompt is None or len(body) - prompt.end() < PREFIX_BYTES:
        return None
    return zlib.crc32(body[prompt.end() : prompt.end() + PREFIX_BYTES])

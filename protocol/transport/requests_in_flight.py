"""Keeps the requests that an engine has not answered completely: their output streams, and their number by adapter.
It remembers the names of their adapters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from lorafleet.protocol.errors import EngineDead
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.transport.output_stream import OutputStream
from lorafleet.protocol.transport.unread_outputs import IsStalled, UnreadOutputs

MAX_NAMES = 10_000  # The least recently used names are forgotten.


class RequestsInFlight:
    def __init__(self) -> None:
        self.streams: dict[str, OutputStream] = {}  # By request ID.
        self.tokens_asked: Counter[str] = Counter()  # Prompts and answers, by digest. Its reader may clear it.
        self.names: LRUCache[str, str] = LRUCache(MAX_NAMES)  # Digests, by the adapters' names.
        self.unread = UnreadOutputs()
        self._num_by_digest: Counter[str] = Counter()
        self._drained: dict[str, asyncio.Event] = {}

    def open(self, request: EngineRequest, abort: Callable[[], None], is_stalled: IsStalled) -> OutputStream:
        """Returns the stream of the request's outputs, which calls `abort` if its client reads them too slowly."""
        unread = self.unread.share(request.tenant, is_stalled)
        stream = self.streams[request.request_id] = OutputStream(unread, abort)
        if request.lora is not None:
            self.names.put(request.lora.lora_name, request.lora.digest)
        self._num_by_digest[_digest(request)] += 1
        return stream

    def close(self, request: EngineRequest, num_tokens: int) -> None:
        """Ends a request whose prompt and answer have so many tokens."""
        del self.streams[request.request_id]
        digest = _digest(request)
        if digest:
            self.tokens_asked[digest] += num_tokens
        self._num_by_digest[digest] -= 1
        if not self._num_by_digest[digest]:
            del self._num_by_digest[digest]
            self._drained.pop(digest, asyncio.Event()).set()

    async def drained(self, digest: str) -> None:
        """Waits until no request for the adapter is in flight."""
        while digest in self._num_by_digest:
            await self._drained.setdefault(digest, asyncio.Event()).wait()

    def fail(self, reason: str) -> None:
        """Ends every stream with EngineDead."""
        for stream in self.streams.values():
            stream.fail(EngineDead(reason))


def _digest(request: EngineRequest) -> str:
    """Returns the digest of the request's adapter, or "" for the base model."""
    return request.lora.digest if request.lora is not None else ""

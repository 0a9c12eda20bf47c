"""Caches rendered pages of /v1/models until the list changes.

A client that lists models often costs only a lookup. Concurrent requests for the same page share its rendering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from lorafleet.protocol.lru_cache import LRUCache

MAX_PAGES = 64  # Rendered pages in the cache; the largest have 0.3 MB.
MAX_AGE_S = 5.0  # Reserved names of tenants may change while the list does not.
MAX_AT_ONCE = 4  # Pages rendered at the same time.


@dataclass(frozen=True, slots=True)
class _Page:
    version: object
    made_s: float
    content: asyncio.Task[bytes]


class ModelPages:
    def __init__(self, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._pages: LRUCache[Hashable, _Page] = LRUCache(MAX_PAGES)
        self._making = asyncio.Semaphore(MAX_AT_ONCE)

    async def get(self, key: Hashable, version: object | None, make: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Returns the page, from the cache if it is current.

        `version` is the list's version, read before this call. If it is None (unknown), the page is made for this
        caller alone.
        """
        if version is None:
            return await self._make(make)
        page = self._pages.get(key)
        if page is None or page.version != version or self._clock() - page.made_s > self._max_age_s:
            page = _Page(version, self._clock(), asyncio.get_running_loop().create_task(self._make(make)))
            self._keep(key, page)
        try:
            return await asyncio.shield(page.content)
        except Exception:
            if self._pages.get(key) is page:
                self._pages.pop(key)
            raise

    async def _make(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        async with self._making:
            return await make()

    def _keep(self, key: Hashable, page: _Page) -> None:
        self._pages.put(key, page)
        # Retrieves the exception, because all clients that asked may have disconnected.
        page.content.add_done_callback(lambda done: done.cancelled() or done.exception())

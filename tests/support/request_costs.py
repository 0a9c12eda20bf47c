"""Measures what one request costs its server: bytes of memory, and the longest time for which it holds the event loop.

Times are those of the loop's own thread on a processor, so that other processes do not count. They are compared with
the time that the machine needs for a piece of known work, so that its speed does not count either.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import httpx
from starlette.types import ASGIApp

CHUNK_BYTES = 1 << 18  # Bytes of a body that arrive at a time.
KNOWN_WORK = json.dumps([str(i) for i in range(100_000)])  # Takes json.loads about 10 ms.


@dataclass(slots=True)
class Costs:
    """The costs of one request."""

    num_bytes: int = 0  # Largest memory beyond the body. 0 if it was not measured.
    pause_s: float = 0.0  # Longest time of one callback of the loop.


def known_work_s() -> float:
    """Returns the time on a processor that this machine needs for the known work."""

    def once() -> float:
        began_s = time.thread_time()
        json.loads(KNOWN_WORK)
        return time.thread_time() - began_s

    return min(once() for _ in range(5))


@contextmanager
def measured_pauses(costs: Costs) -> Iterator[None]:
    """Measures each callback of the event loop of this thread."""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        try:
            run(handle)
        finally:
            costs.pause_s = max(costs.pause_s, time.thread_time() - began_s)

    with mock.patch.object(asyncio.Handle, "_run", timed):  # Python has no hook for this.
        yield


@contextmanager
def measured_memory(costs: Costs) -> Iterator[None]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        costs.num_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


async def post(app: ASGIApp, path: str, body: bytes) -> httpx.Response:
    """Sends the body in chunks, as it comes over a network."""

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), CHUNK_BYTES):
            await asyncio.sleep(0)  # Each chunk wakes the server anew.
            yield body[begin : begin + CHUNK_BYTES]

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        return await client.post(path, content=chunks(), headers={"content-type": "application/json"})


async def pause_of(app: ASGIApp, path: str, body: bytes) -> tuple[httpx.Response, Costs]:
    costs = Costs()
    gc.collect()
    gc.freeze()  # A collection of all objects of a test process takes long, and is not the request's.
    try:
        with measured_pauses(costs):
            return await post(app, path, body), costs
    finally:
        gc.unfreeze()


async def memory_of(app: ASGIApp, path: str, body: bytes) -> tuple[httpx.Response, Costs]:
    costs = Costs()
    with measured_memory(costs):
        return await post(app, path, body), costs

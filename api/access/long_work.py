"""Runs short work on requests and answers in the event loop, and longer work in the front's threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from lorafleet.api.access.body_budget import body_bytes_of
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.served_model import ServedModel
from lorafleet.protocol.lora_request import turn_group

MAX_INLINE_BODY_BYTES = 32 << 10  # A chat of this size takes about 10 ms to check and render.
MAX_INLINE_VALUES = 2048  # An answer with this many numbers and texts takes about 2 ms to write.

T = TypeVar("T")


async def run_by_size(threads: FairThreads, request: Request, work: Callable[[], T]) -> T:
    """Runs work whose cost grows with the size of the request's body. Raises QueueFull."""
    if body_bytes_of(request.scope) <= MAX_INLINE_BODY_BYTES:
        return work()
    return await threads.run(turn_group(caller_of(request).tenant, None), work)


async def run_by_count(threads: FairThreads, model: ServedModel, num_values: int, work: Callable[[], T]) -> T:
    """Runs work whose cost grows with the number of values in the answer. Raises QueueFull."""
    if num_values <= MAX_INLINE_VALUES:
        return work()
    return await threads.run(model.turn_group, work)

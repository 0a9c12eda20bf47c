"""Declares what trainers order all engines of a cluster to do: pause, resume, sleep, end requests, or move to
new weights.

The directory sends such an order to every replica (cluster/admin/engine_orders.py), and workers/engine_controls.py
carries it out between two steps.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lorafleet.protocol.lora_request import LoRARequest

# keep: freezes requests in flight with their tokens. wait: lets those that have started end. abort: ends all of them.
# Requests that have not started wait for ResumeEngine in every mode.
PauseMode = Literal["keep", "wait", "abort"]
# What a push does to requests that its adapter's former version is answering: finish leaves them alone, switch lets
# them go on with the new version from their next token on, and abort ends them.
InFlight = Literal["finish", "switch", "abort"]
# The parts of GPU memory that can be given back: the base's weights and the adapter slots, and the caches of sequences.
MemoryTag = Literal["weights", "kv_cache"]
ALL_MEMORY: tuple[MemoryTag, ...] = ("weights", "kv_cache")
SleepLevel = Literal[1, 2]  # Weights that sleep are in host memory (1), or nowhere but in the checkpoint (2).


class PauseEngine(msgspec.Struct, frozen=True, tag=True):
    """Starts no more requests. Answered once the mode's condition holds: keep, when no step is in flight; wait, when
    no request is left that has started; abort, when all requests have ended."""

    mode: PauseMode


class ResumeEngine(msgspec.Struct, frozen=True, tag=True):
    """Ends every pause, so that waiting requests start."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Ends requests with the finish reason `abort`."""

    prefix: str = ""  # Their request_id begins with it; "" for all.
    tenant: str | None = None  # Only requests of this tenant. None: of everybody.


class SupersedeAdapter(msgspec.Struct, frozen=True, tag=True):
    """Moves the requests for an adapter's former versions to its new one, or ends them.

    It concerns the requests that used the adapter's own name and did not demand the former version: an alias may stand
    for an old version on purpose.
    """

    lora: LoRARequest  # The new version.
    aborts: bool  # Whether the requests are ended. Otherwise they go on with the new version.


class FlushPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forgets the cached keys and values that no running request uses."""


class SleepEngine(msgspec.Struct, frozen=True, tag=True):
    """Pauses the engine and gives GPU memory back. Answered once it is free. Parts that are asleep already stay so."""

    level: SleepLevel = 1
    mode: PauseMode = "abort"  # As in PauseEngine, for an engine that is awake.
    tags: tuple[MemoryTag, ...] = ALL_MEMORY


class WakeEngine(msgspec.Struct, frozen=True, tag=True):
    """Takes GPU memory again. Answered once it is filled. The engine goes on when no part is asleep any more."""

    tags: tuple[MemoryTag, ...] = ALL_MEMORY


class BoundQueue(msgspec.Struct, frozen=True, tag=True):
    """Changes the bounds of the queue. Requests that wait already stay. A deploy with other options gives this order,
    and no trainer."""

    max_requests: int | None  # None: no bound.
    max_tokens: int | None


EngineControl = (
    PauseEngine
    | ResumeEngine
    | AbortRequests
    | SupersedeAdapter
    | FlushPrefixes
    | SleepEngine
    | WakeEngine
    | BoundQueue
)

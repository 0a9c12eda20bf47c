"""The calls that give the GPU memory of all replicas back and take it again, as vLLM's routes."""

from __future__ import annotations

import msgspec

from lorafleet.protocol.admin_verbs import HttpRoute, Verb
from lorafleet.protocol.engine_control import ALL_MEMORY, MemoryTag, PauseMode, SleepLevel


class SleepStatus(msgspec.Struct, frozen=True):
    status: str  # asleep or awake.


class WakeStatus(msgspec.Struct, frozen=True):
    status: str  # awake.
    base_changed: bool = False  # Whether the checkpoint had other weights than before the sleep.
    base_digest: str = ""  # Of the base's weights that answer now.


class SleepState(msgspec.Struct, frozen=True):
    is_sleeping: bool  # Whether any part of the memory is given back.


class SleepAll(Verb[SleepStatus], frozen=True):
    http = HttpRoute("POST", "/sleep", "Give the GPU memory of all replicas back", in_query=True)

    level: SleepLevel = 1
    mode: PauseMode = "abort"


class WakeUpAll(Verb[WakeStatus], frozen=True):
    http = HttpRoute("POST", "/wake_up", "Take the GPU memory of all replicas again", in_query=True)

    tags: tuple[MemoryTag, ...] = ALL_MEMORY


class ShowSleep(Verb[SleepState], frozen=True):
    http = HttpRoute("GET", "/is_sleeping", "Show whether the replicas sleep")

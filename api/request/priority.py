"""Which priorities a caller may ask for. What they do is the engine's (workers/schedule/fair_queue.py)."""

from __future__ import annotations

from lorafleet.api.access.caller import Caller
from lorafleet.api.front import Front
from lorafleet.protocol.errors import InvalidRequest


def checked_priority(front: Front, caller: Caller, given: int | None) -> int:
    """vLLM's: the lower, the sooner. Anybody may step back; where there are keys, to step forward takes one of the
    scope admin, or everybody would."""
    priority = given or 0
    if priority < 0 and front.gate.has_keys and "admin" not in caller.scopes:
        raise InvalidRequest(
            f"`priority` is {priority}; below 0 it takes an API key with the scope admin. Give 0 or more.", "priority"
        )
    return priority

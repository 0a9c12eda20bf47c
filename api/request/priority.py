"""Checks the priority that a caller asks for. The engine acts on it (workers/schedule/fair_queue.py)."""

from __future__ import annotations

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import BACKGROUND


def checked_priority(gate: Gate, caller: Caller, given: int | None) -> int:
    """Returns the priority as in vLLM: a request with a lower value starts sooner.

    A line of a batch has the lowest one, and may name no other. Anyone may ask for a later start. If the server has
    keys, an earlier start needs the scope admin, because otherwise everyone would ask for it.

    Raises InvalidRequest.
    """
    if caller.is_batch:
        if given not in (None, 0, BACKGROUND):
            raise InvalidRequest(
                f"`priority` is {given}, but the lines of a batch start after all other requests; leave it out.",
                "priority",
            )
        return BACKGROUND
    priority = given or 0
    if priority < 0 and gate.has_keys and "admin" not in caller.scopes:
        raise InvalidRequest(
            f"`priority` is {priority}; a value below 0 requires an API key with the scope admin. Give 0 or more.",
            "priority",
        )
    return priority

"""Lets a replica pass a request back to HAProxy, so that another replica can answer it.

HAProxy marks each request that it can send again with an ID (cluster/proxy/haproxy_config.py). Behind Serve's own
proxy, no request is marked.
"""

from __future__ import annotations

from starlette.types import Message, Scope

from lorafleet.protocol.errors import EngineDead, LorafleetError, QueueFull

RETRY_HEADER = "x-serve-router-lorafleet-retry"  # HAProxy removes client headers with this prefix.
MEANT_HEADER = "x-lorafleet-status"  # The client's status if no other replica answers.
RETRY_STATUS = 425  # HAProxy asks another replica if it sees this status, which has no other use here.


def may_be_elsewhere(error: LorafleetError, scope: Scope) -> bool:
    """Returns whether the fault is this replica's alone, and the request will be sent to another replica."""
    if not isinstance(error, EngineDead | QueueFull):
        return False
    return retry_id(scope) is not None


def retry_id(scope: Scope) -> str | None:
    """Returns HAProxy's ID of this request, the same at every replica, or None if it sends the request only once."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == RETRY_HEADER.encode()), None)


def meant_status(start: Message) -> int:
    """Returns the status that an answer has for the client. `start` is the answer's `http.response.start` message."""
    status: int = start["status"]
    if status != RETRY_STATUS:
        return status
    return next((int(value) for name, value in start["headers"] if name == MEANT_HEADER.encode()), status)

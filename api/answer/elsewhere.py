"""How a replica says that another one may answer a request, and how it knows that somebody heeds it.

HAProxy marks the requests that it can send again (cluster/proxy/haproxy_config.py), each with an id of its own. Behind
Serve's own proxy none is marked.
"""

from __future__ import annotations

from starlette.types import Message, Scope

from lorafleet.protocol.errors import EngineDead, LorafleetError, QueueFull

RETRY_HEADER = "x-serve-router-lorafleet-retry"  # HAProxy removes what clients send under this prefix.
MEANT_HEADER = "x-lorafleet-status"  # The client's status, where no other replica answers.
RETRY_STATUS = 425  # HAProxy asks another replica where it sees this status, which nothing else has.


def may_be_elsewhere(error: LorafleetError, scope: Scope) -> bool:
    """Whether this replica alone has the fault, and the request will be sent to another one."""
    if not isinstance(error, EngineDead | QueueFull):
        return False
    return retry_id(scope) is not None


def retry_id(scope: Scope) -> str | None:
    """What HAProxy calls this request at every replica that it sends it to; None where it sends it to one only."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == RETRY_HEADER.encode()), None)


def meant_status(start: Message) -> int:
    """The status of an answer as this replica meant it. start: the `http.response.start` of it."""
    status: int = start["status"]
    if status != RETRY_STATUS:
        return status
    return next((int(value) for name, value in start["headers"] if name == MEANT_HEADER.encode()), status)

"""How a replica says that another one may answer a request, and how it knows that somebody heeds it.

HAProxy marks the requests that it can send again (cluster/haproxy_config.py). Behind Serve's own proxy none is marked.
"""

from __future__ import annotations

from starlette.types import Scope

from lorafleet.workers.errors import EngineDead, LorafleetError, QueueFull

RETRY_HEADER = "x-serve-router-lorafleet-retry"  # HAProxy removes what clients send under this prefix.
MEANT_HEADER = "x-lorafleet-status"  # The client's status, where no other replica answers.
RETRY_STATUS = 425  # HAProxy asks another replica where it sees this status, which nothing else has.


def may_be_elsewhere(error: LorafleetError, scope: Scope) -> bool:
    """Whether this replica alone has the fault, and the request will be sent to another one."""
    if not isinstance(error, EngineDead | QueueFull):
        return False
    return any(name == RETRY_HEADER.encode() for name, _ in scope["headers"])

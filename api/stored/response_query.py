"""Declares what replicas ask each other about stored responses. A replica has the responses that it has generated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

# read: the response; items: the request's own input; conversation: all items up to the end of the response;
# events: those after a number, of a response that was streamed in the background.
QueryAction = Literal["read", "items", "conversation", "events", "cancel", "delete"]


class ResponseQuery(msgspec.Struct, frozen=True):
    owner: str  # Caller.owner of whoever the response belongs to.
    response_id: str
    action: QueryAction = "read"
    after: int = -1  # For `events`: the number of the last event that the client has.


class ResponseFound(msgspec.Struct, frozen=True):
    content: bytes  # JSON of the response, or of a list of items.
    is_running: bool  # Whether the response is being generated.
    in_background: bool
    events: list[bytes] = []
    streams: bool = False  # Whether the response has events.
    num_dropped: int = 0  # The first events, which are not kept any more.


# Asks all replicas. Raises Overloaded if none has the response but not all have answered.
AskReplicas = Callable[[ResponseQuery], Awaitable[ResponseFound | None]]

"""Finds and changes stored responses, here or at the replica that has generated them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from lorafleet.api.stored.response_query import AskReplicas, ResponseFound, ResponseQuery
from lorafleet.api.stored.response_store import ResponseStore, StoredResponse
from lorafleet.protocol.errors import InvalidRequest, Overloaded, QueueFull, ResponseNotFound
from lorafleet.protocol.limits import cut
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits

ASKED = TurnLimits(running=8, waiting=32)  # Queries that are sent to all replicas at a time, and wait for it.
WAIT_FOR_EVENTS_S = 1.0  # How long a query for events waits for the first one.

Items = list[dict[str, Any]]


class StoredResponses:
    """The stored responses of all replicas, as one replica sees them.

    Args:
        store: The responses of this replica.
        ask_replicas: Asks all replicas; None if there is only this one.
    """

    def __init__(self, store: ResponseStore, ask_replicas: AskReplicas | None = None) -> None:
        self.store = store
        self._ask_replicas = ask_replicas
        # Owners and IDs of the responses that requests in flight will store.
        self._claimed: set[tuple[str, str]] = set()
        self._turns = JobTurns(ASKED)

    @property
    def is_on(self) -> bool:
        return self.store.max_bytes > 0

    async def find(self, query: ResponseQuery) -> ResponseFound:
        """Carries out a query, here or elsewhere. Raises ResponseNotFound or QueueFull."""
        found = await self.find_here(query)
        if found is None and self._ask_replicas is not None and self.is_on:
            found = await self._ask(self._ask_replicas, query)
        if found is None:
            raise ResponseNotFound(
                f"There is no response {cut(repr(query.response_id))}. Responses are stored for a limited time, while "
                "their replica runs, unless `store` is false."
            )
        return found

    def claim(self, owner: str, response_id: str) -> Callable[[], None] | None:
        """Reserves an ID that a client has chosen. Returns the function that ends this, or None if it is taken here."""
        claimed = (owner, response_id)
        if claimed in self._claimed or self.store.get(owner, response_id) is not None:
            return None
        self._claimed.add(claimed)
        return lambda: self._claimed.discard(claimed)

    async def is_elsewhere(self, owner: str, response_id: str) -> bool:
        """Returns whether another replica has the response. One that does not answer may have it as well."""
        if self._ask_replicas is None:
            return False
        with suppress(Overloaded):
            return await self._ask(self._ask_replicas, ResponseQuery(owner, response_id)) is not None
        return False

    async def _ask(self, ask_replicas: AskReplicas, query: ResponseQuery) -> ResponseFound | None:
        """Asks all replicas in the owner's turn, since one cheap request costs each of them a call."""
        if query.action == "events":  # A replica has the response, and such a query waits for its next event.
            return await ask_replicas(query)
        try:
            async with self._turns.turn(query.owner):
                return await ask_replicas(query)
        except NoRoom as full:
            raise QueueFull(
                f"This replica cannot look for more stored responses now: {full}. Try again later.",
                retry_after_s=self._turns.retry_after_s,
            ) from None

    async def find_here(self, query: ResponseQuery) -> ResponseFound | None:
        """Carries out a query if this replica has the response."""
        entry = self.store.get(query.owner, query.response_id)
        if entry is None:
            return None
        events: list[bytes] = []
        if query.action == "delete":
            self.store.pop(query.owner, query.response_id)
        if query.action in ("cancel", "delete") and entry.run is not None:
            await entry.run.cancel()
        if query.action == "events" and entry.run is not None:
            events = await entry.run.wait_for_events(query.after, WAIT_FOR_EVENTS_S)
        content = _conversation(entry) if query.action == "conversation" else _current(entry)
        if query.action == "items":
            content = entry.own_input
        num_dropped = 0 if entry.run is None else entry.run.num_dropped
        return ResponseFound(content, entry.is_running, entry.run is not None, events, entry.streams, num_dropped)

    async def conversation(self, owner: str, response_id: str) -> bytes:
        """Returns the items of the conversation up to the end of a response. Raises InvalidRequest."""
        param = "previous_response_id"
        try:
            found = await self.find(ResponseQuery(owner, response_id, "conversation"))
        except ResponseNotFound as error:
            raise InvalidRequest(error.message, param) from None
        if found.is_running or not found.content:
            state = "has not ended yet" if found.is_running else "was canceled or has failed"
            raise InvalidRequest(
                f"`{param}` names a response that {state}; continue another one, or send the whole conversation as "
                "`input`.",
                param,
            )
        return found.content


def _current(entry: StoredResponse) -> bytes:
    return entry.run.answer.encoded() if entry.run is not None and not entry.content else entry.content


def own_items(given: object) -> Items:
    """Returns the items of a request's input."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)  # type: ignore[call-overload]  # messages_of has checked it


class _Ended(msgspec.Struct):
    """The part of a response that a conversation needs."""

    status: str
    output: msgspec.Raw


def _conversation(entry: StoredResponse) -> bytes:
    """Joins the lists of items as they are written, without reading them."""
    if not entry.content:
        return b""
    response = msgspec.json.decode(entry.content, type=_Ended)
    if response.status not in ("completed", "incomplete"):
        return b""
    lists = [entry.history, entry.own_input, bytes(response.output)]
    return b"[" + b",".join(inner for items in lists if (inner := items.strip()[1:-1].strip())) + b"]"

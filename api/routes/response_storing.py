"""Stores the responses of /v1/responses, continues stored ones, and generates responses in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from lorafleet.api.access.body_budget import count_with_body
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission, detach_admissions, ending_with_request
from lorafleet.api.answer.envelope import given_id
from lorafleet.api.answer.responses import encode_json
from lorafleet.api.app_state import AppState
from lorafleet.api.request.responses_bodies import ResponsesRequest
from lorafleet.api.stored.background_run import BackgroundAnswer, BackgroundRun
from lorafleet.api.stored.response_query import ResponseQuery
from lorafleet.api.stored.response_store import ResponseStore, StoredResponse
from lorafleet.api.stored.stored_responses import StoredResponses, own_items
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import cut

MAX_BACKGROUND = 64  # Responses of one tenant or key that a replica generates in the background.


@dataclass(frozen=True, slots=True)
class Keeping:
    """Stores a response that has ended, unless its entry is None. One in the background is stored already."""

    store: ResponseStore
    entry: StoredResponse | None

    def __call__(self, content: bytes) -> None:
        entry = self.entry
        if entry is not None:
            entry.content = content
            if entry.run is None:
                self.store.put(entry)


def check_store(stored: StoredResponses, body: ResponsesRequest) -> None:
    """Raises InvalidRequest if the request needs what is not stored."""
    if body.background and body.store is False:
        raise InvalidRequest("`background` needs `store`, because the response is read later; set it to true.", "store")
    for name, needs in (
        ("store", body.store),
        ("background", body.background),
        ("previous_response_id", body.previous_response_id),
    ):
        if needs and not stored.is_on:
            raise InvalidRequest(
                f"`{name}` needs stored responses, and this server stores none (--response-store-bytes is 0). Send the "
                "whole conversation as `input`.",
                name,
            )


async def read_history(state: AppState, request: Request, body: ResponsesRequest) -> bytes:
    """Returns the items of the conversation that the request continues, or b"" if it continues none.

    They count as if they were in the body. Raises InvalidRequest, QueueFull or Overloaded.
    """
    if body.previous_response_id is None:
        return b""
    items = await state.stored.conversation(caller_of(request).owner, body.previous_response_id)
    count_with_body(request.scope, len(items))
    return items


async def claim_id(state: AppState, request: Request, body: ResponsesRequest, prefix: str) -> None:
    """Reserves the ID of a response that will be stored, if the client has chosen it, until the request has ended.

    Raises InvalidRequest if another response of the caller has it, since each could hide the other.
    """
    chosen = given_id(request, body.request_id)
    if chosen is None or body.store is False or not state.stored.is_on:
        return
    [given, param], owner = chosen, caller_of(request).owner
    end = state.stored.claim(owner, prefix + given)
    if end is not None:
        add_admission(request.scope, ending_with_request(end))
    if end is None or await state.stored.is_elsewhere(owner, prefix + given):
        raise InvalidRequest(
            f"`{param}` is {cut(repr(given))}, and a response of the ID {cut(repr(prefix + given))} is stored already "
            f"or is being generated. Give another `{param}`, delete that response, or set `store` to false.",
            param,
        )


def new_entry(
    stored: StoredResponses, request: Request, body: ResponsesRequest, response_id: str, history: bytes
) -> StoredResponse | None:
    """Returns the entry of a response that will be stored, or None."""
    if body.store is False or not stored.is_on:
        return None
    owner = caller_of(request).owner
    return StoredResponse(response_id, owner, history, encode_json(own_items(body.input)))


async def begin_run(
    state: AppState, request: Request, answer: BackgroundAnswer, entry: StoredResponse, *, streams: bool
) -> None:
    """Starts to generate a response in the background. Its admissions end with it. Raises QueueFull."""
    caller = caller_of(request)
    add_admission(request.scope, state.work_bounds.enter("background responses", MAX_BACKGROUND, caller))
    admissions, store = detach_admissions(request.scope), state.stored.store

    def end() -> None:
        for admission in admissions:
            admission.end()
        if store.get(entry.owner, entry.response_id) is entry:  # Otherwise it was deleted.
            store.put(entry)

    entry.streams = streams
    entry.run = BackgroundRun(answer, lambda: store.fits(entry), end, records=streams)
    store.put(entry)
    await asyncio.sleep(0)  # A task that is canceled before it has begun would never end the admissions.


async def stored_events(stored: StoredResponses, query: ResponseQuery) -> AsyncGenerator[bytes, None]:
    """Yields the response's events after a number until it ends, from whichever replica generates it.

    Raises InvalidRequest if some of them have been dropped.
    """
    while True:
        found = await stored.find(query)
        if query.after + 1 < found.num_dropped:
            raise InvalidRequest(
                f"The first {found.num_dropped} events of this response are no longer stored, because its tenant's "
                f"responses are too large. Read the response without `stream` to get all of it, or set "
                f"`starting_after` to {found.num_dropped - 1} or more to get the later events.",
                "starting_after",
            )
        if found.events:
            yield b"".join(found.events)
        elif not found.is_running:
            yield b""
            return
        query = msgspec.structs.replace(query, after=query.after + len(found.events))

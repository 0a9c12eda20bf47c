"""Serves the routes that read, delete and cancel stored responses, and list their input items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.answer import responses_types
from lorafleet.api.answer.responses import EventStream, json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.routes.operations import describe
from lorafleet.api.routes.response_storing import stored_events
from lorafleet.api.stored.response_query import QueryAction, ResponseFound, ResponseQuery
from lorafleet.api.stored.stored_responses import Items
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import ITEMS_LISTED, MAX_LABEL_CHARS, SEQUENCE_NUMBER

_DEFAULT_LISTED = 20
_ID_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class ShowResponseQuery(Strict):
    stream: bool | None = None
    starting_after: Annotated[int, Within(SEQUENCE_NUMBER)] | None = None  # With stream: the last event received.
    include_obfuscation: Literal[False] | None = None


class InputItemsQuery(Strict):
    after: Annotated[str, AtMost(MAX_LABEL_CHARS)] | None = None  # The ID of the last item of the previous page.
    limit: Annotated[int, Within(ITEMS_LISTED)] | None = None
    order: Literal["asc", "desc"] | None = None  # Default: desc, the last item first.


@describe(
    "Show a stored response",
    answer=responses_types.ResponseBody,
    events=responses_types.ResponseEvent,
    query=ShowResponseQuery,
)
async def show_response(state: AppState, request: Request) -> Response:
    query = parse_query(request, ShowResponseQuery)
    if query.starting_after is not None and not query.stream:
        raise InvalidRequest("`starting_after` is allowed only if stream is true.", "starting_after")
    found = await state.stored.find(_query(request, "read"))
    if not query.stream:
        return _json(found)
    if not found.streams:
        raise InvalidRequest(
            "Only responses that were created with `background` and `stream` can be streamed again; set stream to "
            "false.",
            "stream",
        )
    after = -1 if query.starting_after is None else query.starting_after
    return EventStream(stored_events(state.stored, _query(request, "events", after)))


@describe("Delete a stored response", answer=responses_types.ResponseDeleted)
async def delete_response(state: AppState, request: Request) -> Response:
    query = _query(request, "delete")
    await state.stored.find(query)
    return json_response({"id": query.response_id, "object": "response", "deleted": True})


@describe("Cancel a response in the background", answer=responses_types.ResponseBody)
async def cancel_response(state: AppState, request: Request) -> Response:
    found = await state.stored.find(_query(request, "cancel"))
    if not found.in_background:
        raise InvalidRequest("Only responses that were created with `background` can be canceled.", "response_id")
    return _json(found)


@describe("List the input items of a stored response", answer=responses_types.InputItems, query=InputItemsQuery)
async def list_input_items(state: AppState, request: Request) -> Response:
    query = parse_query(request, InputItemsQuery)
    asked = _query(request, "items")
    found = await state.stored.find(asked)
    items = _shown(msgspec.json.decode(found.content), asked.response_id)
    if query.order != "asc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise InvalidRequest(f"`after` is {query.after!r}, which is no input item of this response.", "after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit or _DEFAULT_LISTED]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


def _query(request: Request, action: QueryAction, after: int = -1) -> ResponseQuery:
    return ResponseQuery(caller_of(request).owner, request.path_params["response_id"], action, after)


def _json(found: ResponseFound) -> Response:
    return Response(found.content, media_type="application/json")


def _shown(items: Items, response_id: str) -> Items:
    """Returns the items in OpenAI's form: each with an ID and a type, and texts as parts."""
    shown: Items = []
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        known: dict[str, Any] = {name: value for name, value in item.items() if value is not None}
        known |= {"type": kind, "id": known.get("id") or f"{_ID_PREFIXES.get(kind, 'msg')}_{response_id}_{i}"}
        known.setdefault("status", "completed")
        if kind == "message" and isinstance(known["content"], str):
            part = "output_text" if known["role"] == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
            known["content"] = [{"type": part, "text": known["content"], **more}]
        shown.append(known)
    return shown

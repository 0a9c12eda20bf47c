"""Converts the bytes of a request to a checked body. Every fault is an InvalidRequest that names the field."""

from __future__ import annotations

import asyncio
from typing import TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.requests import Request

from lorafleet.api.access.body_budget import HeldBody, set_body
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission
from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.app_state import AppState
from lorafleet.api.request.bounds import OVER_BOUND
from lorafleet.api.request.fields import Tolerant, without_no_ops
from lorafleet.protocol.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from lorafleet.protocol.limits import MAX_BODY_READ_S, cut
from lorafleet.protocol.outside.header_numbers import header_number
from lorafleet.protocol.outside.json_counts import JsonCounts

JSON = "application/json"

Body = TypeVar("Body", bound=BaseModel)


async def read_body(state: AppState, request: Request, model: type[Body]) -> Body:
    """Reads and checks the body of a request.

    Raises BodyTooLarge, QueueFull or Overloaded before more bytes than their limits are in memory, and other
    InvalidRequest errors.
    """
    _check_content_type(request)
    check_encoding(request)
    held = HeldBody(state.body_budget, caller_of(request))
    set_body(request.scope, held)
    add_admission(request.scope, held)
    raw = await _read_bytes(request, state.config.max_body_bytes, held)
    return await run_by_size(state.long_work, request, lambda: parse_object(parse_json(raw), model))


def parse_query(request: Request, model: type[Body]) -> Body:
    """Reads the query parameters, which are texts, and converts numbers and booleans. A parameter that is a list may be
    given more than once. Raises InvalidRequest."""
    given: dict[str, object] = dict(request.query_params)
    for name, field in model.model_fields.items():
        if name in given and _is_list(field):
            given[name] = request.query_params.getlist(name)
    unknown = given.keys() - set(model.model_fields)
    if unknown:
        name = cut(min(unknown))
        raise InvalidRequest(f"`{name}` is not a parameter of this request; remove it.", name)
    try:
        return model.model_validate(given, strict=False)
    except ValidationError as error:
        raise _invalid(error, "", given) from error


def _is_list(field: FieldInfo) -> bool:
    """Returns whether the field takes a list."""
    return list in {get_origin(kind) for kind in (field.annotation, *get_args(field.annotation))}


def _check_content_type(request: Request) -> None:
    """Rejects other types than JSON, because browsers send them to other sites without asking the server first."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != JSON:
        said = f"is {cut(given)!r}" if given else "is missing"
        raise UnsupportedMediaType(
            f"The header Content-Type {said}; send JSON with `Content-Type: {JSON}` (curl: -H 'content-type: {JSON}')."
        )


def check_encoding(request: Request) -> None:
    """Rejects compressed bodies, of which a few bytes may become any number."""
    given = request.headers.get("content-encoding", "")
    if given.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            f"The header Content-Encoding is {cut(given)!r}, but this server reads bodies as they are. Send the body "
            "uncompressed, without this header."
        )


async def _read_bytes(request: Request, limit: int, held: HeldBody) -> bytes:
    declared = header_number(request.headers.get("content-length", ""))
    if declared is not None and declared > limit:
        raise _too_large(str(declared), limit)
    try:
        async with asyncio.timeout(MAX_BODY_READ_S):
            return await _read_parts(request, limit, held)
    except TimeoutError:
        raise BodyTimeout(
            f"The body did not arrive within {MAX_BODY_READ_S:g} s; send a smaller body, or use a faster connection."
        ) from None


async def _read_parts(request: Request, limit: int, held: HeldBody) -> bytes:
    """Reads the body, and counts what is slow to parse in each part, so that the event loop can run between parts."""
    parts: list[bytes] = []
    size, counts = 0, JsonCounts("The body")
    async for part in request.stream():
        size += len(part)
        if size > limit:  # The body may come in chunks, without a declared length.
            raise _too_large(f"more than {limit}", limit)
        counts.add(part)
        held.add(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large(size: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has {cut(size)} bytes; this server accepts at most {limit}. Send fewer prompts in one request, or "
        "start the server with a larger --max-body-bytes."
    )


def parse_json(raw: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors.
        raise InvalidRequest(f"The body is not valid JSON: {cut(str(error))}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {_json_type(body)}.")
    return body


def parse_object(body: dict[str, object], model: type[Body], where: str = "") -> Body:
    """Checks an object of a body. `where`, such as "sampling_params.", is put before the names of fields in errors."""
    rest = without_no_ops(body, set(model.model_fields), where) if issubclass(model, Tolerant) else body
    try:
        return model.model_validate(rest)
    except ValidationError as error:
        raise _invalid(error, where, rest) from error


def _invalid(error: ValidationError, where: str, body: dict[str, object]) -> InvalidRequest:
    """Returns the deepest fault of the first faulty field. In a union, its member is the one that the client meant."""
    faults = error.errors(include_url=False)
    faults = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    paths = [_path(fault["loc"], body, fault["type"] == "missing") for fault in faults]
    path = max(paths, key=len)
    fault = faults[paths.index(path)]
    param = where + ".".join(cut(str(part)) for part in path)
    if fault["type"] == "extra_forbidden":
        return InvalidRequest(f"`{param}` is not a field of this request; remove it.", param)
    if fault["type"] == "missing":
        return InvalidRequest(f"`{param}` is missing.", param)
    here = [fault for fault, its in zip(faults, paths, strict=True) if its == path and fault["type"] != "missing"]
    wishes = [_wish(fault) for fault in here if fault["type"] == OVER_BOUND] or [_wish(fault) for fault in here]
    return InvalidRequest(f"`{param or 'The body'}` {' or '.join(dict.fromkeys(wishes))}.", param or None)


def _path(location: tuple[int | str, ...], body: object, misses_last: bool) -> tuple[int | str, ...]:
    """Returns the location without the names of union members, which pydantic adds."""
    path: list[int | str] = []
    for i, key in enumerate(location):
        missing = misses_last and i == len(location) - 1
        if missing or (isinstance(body, dict) and key in body) or (isinstance(body, list) and isinstance(key, int)):
            path.append(key)
            body = None if missing else body[key]  # type: ignore[index]  # mypy forgets what `or` joined
    return tuple(path)


def _wish(fault: ErrorDetails) -> str:
    if fault["type"] == "union_tag_invalid":
        return f"should have a `type` of {fault['ctx']['expected_tags']}"
    if fault["type"] == "union_tag_not_found":
        return "should have a `type`"
    if fault["type"] in ("too_short", "string_too_short"):
        what = "characters" if isinstance(fault["input"], str) else "entries"
        return f"has {len(fault['input'])} {what}; it must have at least {fault['ctx']['min_length']}"
    return fault["msg"].replace("Input should", "should", 1)


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")

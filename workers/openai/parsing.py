"""From the bytes of a request to a checked body; every fault is an InvalidRequest that names the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.openai.fields import without_no_ops

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    return parse_object(parse_json(await request.body()), model)


def parse_json(raw: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {_json_type(body)}.")
    return body


def parse_object(body: dict[str, object], model: type[Body], where: str = "") -> Body:
    """`where` is put before the names of fields, such as "sampling_params."."""
    rest = without_no_ops(body, set(model.model_fields), where)
    try:
        return model.model_validate(rest)
    except ValidationError as error:
        raise _invalid(error, where) from error


def _invalid(error: ValidationError, where: str) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    location = first["loc"]
    # A union's errors name the member that did not fit after the field; the field is what the client wrote.
    path = location[:1] if len({e["loc"][:1] for e in error.errors()}) < error.error_count() else location
    param = where + ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"`{param}` is no field of this request; remove it.", param)
    if first["type"] == "missing":
        return InvalidRequest(f"`{param}` is missing.", param)
    wishes = " or ".join(dict.fromkeys(_wish(e["msg"]) for e in error.errors() if e["loc"][:1] == location[:1]))
    return InvalidRequest(f"`{param}` {wishes}.", param)


def _wish(message: str) -> str:
    return message.replace("Input should", "should", 1)


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")

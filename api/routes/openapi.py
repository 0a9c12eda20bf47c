"""Makes the OpenAPI document of a server's routes.

It is derived from the models that check bodies, the table of fields that other servers' clients send, the types of
answers and the table of errors. This module adds no facts of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter

from lorafleet import __version__
from lorafleet.api.access.caller import Needed
from lorafleet.api.answer.answer_types import ErrorBody
from lorafleet.api.answer.anthropic_errors import speaks_anthropic
from lorafleet.api.answer.anthropic_types import AnthropicErrorBody
from lorafleet.api.answer.error_responses import TABLE
from lorafleet.api.request.fields import Tolerant, tolerated
from lorafleet.api.routes.operations import (
    QUEUE_TIMEOUT,
    REQUEST_ID,
    FileBytes,
    Operation,
    PlainText,
    TarFile,
    TensorBytes,
    UploadForm,
    operation_of,
)
from lorafleet.protocol.limits import FILE_LIVES_S, MAX_MODEL_CHARS, MAX_REQUEST_ID_CHARS, QUEUE_TIMEOUT_S

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_KEY: Schema = {"key": []}  # The name of the security scheme.
_BYTES: Schema = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_ERRORS = {"Error": ErrorBody, "AnthropicError": AnthropicErrorBody}
_TAR: Schema = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_FORM: Schema = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"const": "batch"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": {
                    "type": "integer",
                    "minimum": FILE_LIVES_S.low,
                    "maximum": FILE_LIVES_S.high,
                },
            },
            "required": ["file", "purpose"],
            "additionalProperties": False,
        }
    }
}
_BODIES = {TarFile: _TAR, TensorBytes: _BYTES, UploadForm: _FORM}


# The headers that requests to generating routes may have.
_HEADERS: dict[str, Schema] = {
    REQUEST_ID: {
        "name": REQUEST_ID,
        "in": "header",
        "description": "The request's id, if its body has none.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[ -~]*$"},
    },
    QUEUE_TIMEOUT: {
        "name": QUEUE_TIMEOUT,
        "in": "header",
        "description": "How long the request may wait to start.",
        "schema": {"type": "number", "minimum": QUEUE_TIMEOUT_S.low, "maximum": QUEUE_TIMEOUT_S.high},
    },
}


@dataclass(frozen=True, slots=True)
class _Described:
    method: str
    path: str
    needed: Needed
    operation: Operation


def openapi(routes: Iterable[tuple[str, str, Needed, Callable[..., Any]]]) -> Schema:
    described = [
        _Described(method, path, needed, operation)
        for method, path, needed, handler in routes
        if (operation := operation_of(handler)) is not None
    ]
    schemas = _Schemas(described)
    paths: dict[str, Schema] = {}
    for route in described:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorafleet", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "responses": {
                name: {"description": "The request was rejected or failed.", "content": _json(schemas.of(body))}
                for name, body in _ERRORS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """The schemas of all types that the operations mention. `definitions` has them by name."""

    def __init__(self, described: Iterable[_Described]) -> None:
        bodies = {route.operation.body for route in described} | {route.operation.query for route in described}
        models = [body for body in bodies if body is not None and issubclass(body, BaseModel)]
        answers = [answer for route in described for answer in (route.operation.answer, route.operation.events)]
        types = [
            *models,
            *(kind for kind in answers if kind not in (None, PlainText, TarFile, FileBytes)),
            *_ERRORS.values(),
        ]
        self._names = {str(kind): i for i, kind in enumerate(dict.fromkeys(types))}
        inputs = [
            (i, "validation" if kind in models else "serialization", TypeAdapter(kind))
            for i, kind in enumerate(dict.fromkeys(types))
        ]
        found, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF)  # type: ignore[arg-type]  # mypy infers str
        self._found = {key: schema for (key, _), schema in found.items()}
        self.definitions: dict[str, Schema] = shared.get("$defs", {})
        for model in models:
            if issubclass(model, Tolerant):
                self.definitions[model.__name__]["properties"] |= tolerated(model)

    def of(self, kind: Any) -> Schema:
        return self._found[self._names[str(kind)]]


def _operation(route: _Described, schemas: _Schemas) -> Schema:
    made: Schema = {
        "summary": route.operation.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower())}",
        "parameters": [
            *_path_parameters(route.path),
            *_query_parameters(route.operation.query, schemas),
            *(_HEADERS[name] for name in route.operation.headers),
        ],
        "responses": {"200": _success(route.operation, schemas), **_errors(route.path)},
        "security": {"open": [{}], "admin": [_KEY]}.get(route.needed, [_KEY, {}]),
    }
    if route.operation.body in _BODIES:
        made["requestBody"] = {"required": True, "content": _BODIES[route.operation.body]}
    elif route.operation.body is not None:
        made["requestBody"] = {"required": True, "content": _json(schemas.of(route.operation.body))}
    return made


def _path_parameters(path: str) -> list[Schema]:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARS}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in _PARAMETER.findall(path)]


def _query_parameters(query: type[BaseModel] | None, schemas: _Schemas) -> list[Schema]:
    if query is None:
        return []
    schema = schemas.definitions[query.__name__]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _not_null(parameter)}
        for name, parameter in schema["properties"].items()
    ]


def _not_null(schema: Schema) -> Schema:
    """Returns the schema without null, because a query parameter is text and cannot be null."""
    if "anyOf" in schema:
        return next(member for member in schema["anyOf"] if member.get("type") != "null")
    return schema


def _success(operation: Operation, schemas: _Schemas) -> Schema:
    content: Schema = {}
    if operation.answer is PlainText:
        content["text/plain"] = {"schema": {"type": "string"}}
    elif operation.answer is TarFile:
        content |= _TAR
    elif operation.answer is FileBytes:
        content |= _BYTES
    elif operation.answer is not None:
        content |= _json(schemas.of(operation.answer))
    if operation.events is not None:
        # OpenAPI 3.1 cannot describe events. Each event is `data: ` and this JSON.
        events = {"schema": {"type": "string"}, "x-event-schema": schemas.of(operation.events)}
        content["text/event-stream"] = events
    return {"description": "The request succeeded."} | ({"content": content} if content else {})


def _errors(path: str) -> Schema:
    name = "AnthropicError" if speaks_anthropic(path) else "Error"
    statuses = sorted({str(kind.status) for kind in TABLE.values()})
    return {status: {"$ref": f"#/components/responses/{name}"} for status in statuses}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}

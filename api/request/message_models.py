"""Makes pydantic models of messages and answers, which are msgspec structs in protocol/.

So a message is declared once: its model checks the bodies and queries of HTTP calls, and the models of messages and
answers describe the routes in /openapi.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import FieldInfo
from pydantic import BaseModel, ConfigDict, Field, create_model

from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.protocol.limits import Range

Leaf = Callable[[Any], Any]  # Converts a type without arguments.


def request_model(
    message: type[msgspec.Struct], name: str, in_path: Collection[str] = (), about: str | None = None
) -> type[Strict]:
    """Returns the model of a message's fields in a body or query, without those in the path. `name` and `about` are the
    name and description of its schema."""
    hints = get_type_hints(message, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (_converted(hints[field.name], lambda leaf: leaf), _default(field))
        for field in msgspec.structs.fields(message)
        if field.name not in in_path
    }
    return create_model(name, __base__=Strict, __doc__=about, **fields)


class AnswerModels:
    """The models of answers, which only describe them; the structs themselves are sent.

    Args:
        names: Names of schemas that are not those of the structs.
    """

    def __init__(self, names: Mapping[type, str]) -> None:
        self._names = names
        self._models: dict[type, type[BaseModel]] = {}

    def model(self, answer: type) -> type[BaseModel]:
        if answer not in self._models:
            hints = get_type_hints(answer, include_extras=True)
            fields: dict[str, Any] = {
                field.name: self._described(hints[field.name], field) for field in msgspec.structs.fields(answer)
            }
            name = self._names.get(answer, answer.__name__)
            self._models[answer] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        return self._models[answer]

    def _described(self, hint: Any, field: FieldInfo) -> tuple[Any, Any]:
        if field.required:
            return _converted(hint, self._leaf), ...
        # A field that has its default is left out of the answer. So None is never sent, and no default is described.
        sent = [arg for arg in get_args(hint) if arg is not type(None)] if field.default is None else [hint]
        return _converted(reduce(or_, sent), self._leaf), Field(default_factory=lambda: None)

    def _leaf(self, hint: Any) -> Any:
        return self.model(hint) if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else hint


def _default(field: FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return Field(default_factory=field.default_factory)
    return ... if field.required else field.default


def _converted(hint: Any, leaf: Leaf) -> Any:
    """Returns the type with its leaves converted, and with the bounds that pydantic checks in place of the struct's."""
    origin, arguments = get_origin(hint), get_args(hint)
    if not arguments or origin is Literal:
        return leaf(hint)
    if origin is Annotated:
        return Annotated[(_converted(arguments[0], leaf), *map(_bound, arguments[1:]))]
    inner = tuple(_converted(argument, leaf) for argument in arguments)
    return reduce(or_, inner) if origin in (Union, UnionType) else origin[inner]


def _bound(mark: object) -> AtMost | Within:
    if isinstance(mark, Range):
        return Within(mark)
    assert isinstance(mark, msgspec.Meta) and mark.max_length is not None, mark
    return AtMost(mark.max_length)

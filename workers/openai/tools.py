"""What a request says of tools: which functions the model is shown, whether it must call one, how its calls are read.

A call that is demanded is forced by a schema, whatever the model's own format; one that is the model's choice is read
by its template's format (tool_calls/known.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.openai.front import Front, ServedModel
from lorafleet.workers.openai.protocol import (
    AllowedToolChoice,
    FunctionDefinition,
    NamedToolChoice,
    Tool,
    ToolChoice,
    ToolMode,
)
from lorafleet.workers.openai.tool_calls.forced import NamedCallParser, RequiredCallsParser
from lorafleet.workers.openai.tool_calls.known import KnownFormat
from lorafleet.workers.openai.tool_calls.parser import CallArguments, Calls, CallStart, Event, Text, ToolCallParser
from lorafleet.workers.sampling_params import SamplingParams
from lorafleet.workers.structured import spec
from lorafleet.workers.tokenizer import Tokenizer

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's default


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one request. shown: the tools as the template is given them; None: it is told of none. forced: what the answer
    must match. known: the format that the model's own calls are read by; None where none are read."""

    shown: list[dict[str, Any]] | None = None
    forced: spec.StructuredOutputs | None = None
    known: KnownFormat | None = None
    names: tuple[str, ...] = ()
    named: str | None = None  # the one function that must be called
    parallel: bool = True

    @property
    def calls(self) -> bool:
        """Whether the answer may have calls."""
        return self.known is not None or self.forced is not None

    def params(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        if self.calls and params.structured_outputs is not None:
            raise InvalidRequest(
                f"`{params.structured_outputs.param}` says what the whole answer is, so that it can be no call of a "
                "tool; set `tool_choice` to 'none', or leave one of the two out.",
                "tools",
            )
        if self.forced is not None:
            return msgspec.structs.replace(params, structured_outputs=self.forced)
        asked = params.structured_outputs
        if self.known is not None and asked is not None:
            if not asked.is_default:
                raise InvalidRequest(
                    f"`{asked.param}` says what the whole answer looks like, and `tools` that it may be a call; set "
                    "tool_choice to none or required, or leave one of them out.",
                    asked.param,
                )
            params = msgspec.structs.replace(params, structured_outputs=None)
        if self.known is not None and self.known.marker in tokenizer.special_texts:
            return msgspec.structs.replace(params, skip_special_tokens=False)  # or the marker would never be seen
        return params

    def reader(self, *, eager: bool) -> AnswerReader:
        if self.named is not None:
            calls = Calls(self.names, eager=True)
            return AnswerReader(NamedCallParser(calls, self.named), parallel=False)
        if self.forced is not None:
            return AnswerReader(RequiredCallsParser(Calls(self.names, eager=True)), parallel=self.parallel)
        assert self.known is not None
        calls = Calls(self.names, eager=eager, new_id=self.known.new_id)
        return AnswerReader(self.known.make(calls), parallel=self.parallel)


class AnswerReader:
    """One answer's text and calls. parallel: else calls after the first are dropped."""

    def __init__(self, parser: ToolCallParser, *, parallel: bool) -> None:
        self.has_called = False
        self._parser = parser
        self._parallel = parallel

    def push(self, text: str) -> list[Event]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Event]:
        return self._kept(self._parser.finish())

    def _kept(self, events: list[Event]) -> list[Event]:
        self.has_called = self.has_called or any(isinstance(event, CallStart) for event in events)
        return events if self._parallel else [e for e in events if isinstance(e, Text) or e.index == 0]


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


def read_answer(reader: AnswerReader, text: str) -> tuple[str | None, list[Call]]:
    """Of a whole answer: its content, None where there are calls alone, and its calls."""
    content, calls = "", list[Call]()
    for event in [*reader.push(text), *reader.finish()]:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append(Call(event.id, event.name))
        else:
            calls[event.index].arguments += event.text
    return (content or None) if calls else content, calls


def delta_of(event: Event) -> dict[str, object]:
    """As chat's streams write it."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}


def read_tools(
    front: Front,
    model: ServedModel,
    tools: list[Tool] | None,
    choice: ToolMode | ToolChoice | None,
    parallel: bool | None,
) -> ToolUse:
    if isinstance(choice, AllowedToolChoice):
        tools = _allowed(tools or [], choice)
        choice = choice.allowed_tools.mode
    functions = [tool.function for tool in tools or ()]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` asks for a call, and `tools` names no function; give some.", "tools")
        return ToolUse()
    names = tuple(function.name for function in functions)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"`tools` names {twice!r} twice; give each function its own name.", "tools")
    if choice == "none":
        return ToolUse()
    if not front.shows_tools(model):
        raise InvalidRequest(
            "This model's chat template shows it no tools; start the server with a --chat-template that does, or send "
            "no `tools`.",
            "tools",
        )
    shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    make = _demanded(functions, names, choice, parallel is not False)
    if make is not None:
        return make(shown)
    known = front.tool_format(model)
    if known is None:
        raise InvalidRequest(
            "It is not known how this model writes its calls, so that `tool_choice` cannot be auto; start the server "
            "with a --tool-call-parser, or demand a call by 'required' or by name.",
            "tool_choice",
        )
    return ToolUse(shown, None, known, names, parallel=parallel is not False)


def _allowed(tools: list[Tool], choice: AllowedToolChoice) -> list[Tool]:
    names = {one.function.name for one in choice.allowed_tools.tools}
    unknown = names - {tool.function.name for tool in tools}
    if unknown:
        raise InvalidRequest(f"`tool_choice` allows {min(unknown)!r}, which is none of `tools`.", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def _demanded(
    functions: list[FunctionDefinition],
    names: tuple[str, ...],
    choice: ToolMode | NamedToolChoice | None,
    parallel: bool,
) -> Callable[[list[dict[str, Any]]], ToolUse] | None:
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(f"`tool_choice` names {name!r}, which is none of `tools`.", "tool_choice")
        schema = _parameters(functions[names.index(name)])
        forced = spec.json_schema(schema, "tools", any_whitespace=False)
        return lambda shown: ToolUse(shown, forced, None, names, name)
    if choice == "required":
        forced = spec.json_schema(_calls_schema(functions, parallel), "tools", any_whitespace=False)
        return lambda shown: ToolUse(shown, forced, None, names, parallel=parallel)
    return None


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or NO_PARAMETERS


def _calls_schema(functions: list[FunctionDefinition], parallel: bool) -> dict[str, Any]:
    """Of an array of calls. Each function's schema keeps its inner references, moved to where it now is."""
    definitions = {f"tool_{i}": _moved(_parameters(one), f"#/$defs/tool_{i}") for i, one in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one.name}, "parameters": {"$ref": f"#/$defs/tool_{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, one in enumerate(functions)
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: to + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for name, value in schema.items()
    }

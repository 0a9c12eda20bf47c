"""Reads a request's tools: which functions the model is shown, whether it must call one, how its calls are parsed.

A required call is forced by a schema, whatever the model's own format is. An optional call is parsed by the format of
the model's template (tool_calls/known.py). A grammar constrains it from its beginning if a function is strict, or if
answers that are not calls also have a format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from lorafleet.api.request.request_bodies import (
    AllowedToolChoice,
    ChatRequest,
    FunctionDefinition,
    NamedToolChoice,
    Tool,
)
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text_service import TextService
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.forced import NamedCallParser, RequiredCallsParser, calls_schema
from lorafleet.api.tool_calls.formatted import FormattedParser, may_open_like
from lorafleet.api.tool_calls.known import KnownFormat
from lorafleet.api.tool_calls.parser import CallArguments, Calls, CallStart, Event, Text, ToolCallParser
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.structured_spec import StructuredOutputs

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's default.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use of tools in one request."""

    answer: StructuredOutputs | None  # The format that the answer must match.
    shown: list[dict[str, Any]] | None = None  # The tools that the template gets; None: no tools.
    # Makes a parser of an answer's calls from `eager` (see parser.Calls); None if no calls are parsed.
    parser: Callable[[bool], ToolCallParser] | None = None
    parallel: bool = True  # An answer may have more than one call.
    shows_special: bool = False  # A special token marks calls.

    @property
    def calls(self) -> bool:
        """Whether the answer may contain calls."""
        return self.parser is not None

    def params(self, params: SamplingParams) -> SamplingParams:
        skips = params.skip_special_tokens and not self.shows_special  # Else the marker would be removed.
        return msgspec.structs.replace(params, structured_outputs=self.answer, skip_special_tokens=skips)

    def reader(self, *, eager: bool) -> AnswerReader:
        assert self.parser is not None
        return AnswerReader(self.parser(eager), parallel=self.parallel)


class AnswerReader:
    """Reads the text and the calls of one answer. If not `parallel`, calls after the first are dropped."""

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
    """Returns the content and the calls of a whole answer. The content is None if there are only calls."""
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
    """Returns the `delta` entry of a chat chunk for the event."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}


def read_tools(texts: TextService, model: ServedModel, body: ChatRequest, text: StructuredOutputs | None) -> ToolUse:
    """Reads the tools of a request. `text` is the format of answers that are not calls. Raises InvalidRequest."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        tools = _allowed(tools, choice)
        choice = choice.allowed_tools.mode
    functions = [tool.function for tool in tools]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "`tool_choice` requires a call, but `tools` names no function; give at least one.", "tools"
            )
        return ToolUse(text)
    names = Counter(function.name for function in functions)
    [(most, times)] = names.most_common(1)
    if times > 1:
        raise InvalidRequest(f"`tools` has two functions named {most!r}; give each function its own name.", "tools")
    if choice == "none":
        return ToolUse(text)
    if not texts.shows_tools(model):
        raise InvalidRequest(
            "This model's chat template does not support tools; start the server with a --chat-template that does, "
            "or send no `tools`.",
            "tools",
        )
    if text is not None and text.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"`{text.param}` sets the format of the answer, but with `tools` the answer may be a call instead, and "
            "only JSON can be distinguished from a call. Give a JSON schema, set tool_choice to none, or leave one "
            "of the two out.",
            text.param,
        )
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        return _named(functions, choice.function.name, shown)
    if choice == "required":
        schema = calls_schema({function.name: _parameters(function) for function in functions}, parallel=parallel)
        forced = structured_spec.json_schema(schema, "tools", any_whitespace=False)
        return ToolUse(forced, shown, lambda _: RequiredCallsParser(Calls(names, eager=True)), parallel)
    return _chosen(texts.tool_format(model), functions, model, shown, parallel, text)


def _allowed(tools: list[Tool], choice: AllowedToolChoice) -> list[Tool]:
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = names - {tool.function.name for tool in tools}
    if unknown:
        raise InvalidRequest(f"`tool_choice` allows {min(unknown)!r}, which is not one of the `tools`.", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def _chosen(
    known: KnownFormat | None,
    functions: list[FunctionDefinition],
    model: ServedModel,
    shown: list[dict[str, Any]],
    parallel: bool,
    text: StructuredOutputs | None,
) -> ToolUse:
    """Returns the tool use for calls that the model may make."""
    if known is None:
        raise InvalidRequest(
            "The format of this model's tool calls is unknown, so `tool_choice` cannot be auto; start the server "
            "with a --tool-call-parser, or set `tool_choice` to 'required' or to a named function.",
            "tool_choice",
        )
    special = model.tokenizer.special_texts
    answer = None
    if text is not None or any(function.strict for function in functions):
        offered = {function.name: _parameters(function) if function.strict else ANY_ARGUMENTS for function in functions}
        answer = _constraint(known, Offer(offered, special, parallel, text))

    def parser(eager: bool) -> ToolCallParser:
        calls = known.make(Calls([function.name for function in functions], eager=eager, new_id=known.new_id))
        return calls if text is None else FormattedParser(known.openings, calls)

    return ToolUse(answer, shown, parser, parallel, known.marker in special)


def _named(functions: list[FunctionDefinition], name: str, shown: list[dict[str, Any]]) -> ToolUse:
    function = next((function for function in functions if function.name == name), None)
    if function is None:
        raise InvalidRequest(f"`tool_choice` names {name!r}, which is not one of the `tools`.", "tool_choice")
    forced = structured_spec.json_schema(_parameters(function), "tools", any_whitespace=False)
    return ToolUse(forced, shown, lambda _: NamedCallParser(Calls([name], eager=True), name), parallel=False)


def _constraint(known: KnownFormat, offer: Offer) -> StructuredOutputs:
    """Returns the constraint of an answer with optional calls.

    Raises InvalidRequest if an answer that is not a call could look like one.
    """
    if offer.text is not None and may_open_like(offer.text, known.openings):
        raise InvalidRequest(
            f"`{offer.text.param}` is used together with `tools`, and an answer in that format could begin like a "
            'call of this model. Give a schema of type object with "additionalProperties": false and without a '
            "property `name`, set tool_choice to none or required, or set response_format to text.",
            offer.text.param,
        )
    return offer.constraint(known.grammar(offer))


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    schema = function.parameters or NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"`parameters` of {function.name!r} must be of type object, because the arguments of a call are an object.",
            "tools",
        )
    return schema if "type" in schema else {**schema, "type": "object"}

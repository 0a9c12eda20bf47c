"""Reads a request's tools: which functions the model is shown, whether it must call one, how its answers are parsed.

A required call is forced by a schema, whatever the model's own format is. An optional call is parsed by the format of
the model's template (tool_calls/known.py). A grammar constrains it from its beginning if a function is strict, or if
answers that are not calls also have a format. Reasoning is separated by the parser of the calls if the format marks it,
else by tags such as <think>.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lorafleet.api.request.custom_tools import as_functions
from lorafleet.api.request.request_bodies import ChatRequest, ConvertedChat
from lorafleet.api.request.tool_bodies import (
    AllowedToolChoice,
    AnyTool,
    CustomTool,
    FunctionDefinition,
    NamedCustomChoice,
    NamedToolChoice,
    Tool,
    ToolMode,
)
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.token_table import TokenTable
from lorafleet.api.text_service import TextService
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.custom_input import InputReader
from lorafleet.api.tool_calls.forced import NamedCallParser, RequiredCallsParser, calls_schema
from lorafleet.api.tool_calls.formatted import FormattedParser, may_open_like
from lorafleet.api.tool_calls.known import KnownFormat
from lorafleet.api.tool_calls.parser import (
    CallArguments,
    Calls,
    CallStart,
    Event,
    NewId,
    Reasoning,
    Text,
    ToolCallParser,
    openai_id,
)
from lorafleet.api.tool_calls.reasoning_grammar import BUDGET, beginning_of, may_reason, with_reasoning
from lorafleet.api.tool_calls.thinking import Tags, ThinkingParser
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.structured_spec import StructuredOutputs

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's default.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}

Choice = ToolMode | NamedToolChoice | NamedCustomChoice | None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use of tools in one request."""

    answer: StructuredOutputs | None  # The format that the answer must match.
    shown: list[dict[str, Any]] | None = None  # The tools that the template gets; None: no tools.
    # Makes a parser of an answer's calls from `eager` (see parser.Calls); None if no calls are parsed.
    parser: Callable[[bool], ToolCallParser] | None = None
    tags: Tags | None = None  # The tags around reasoning; None: none is separated by tags.
    parallel: bool = True  # An answer may have more than one call.
    shows_special: bool = False  # A special token marks calls or reasoning.
    parses_channels: bool = False  # The parser separates reasoning too.
    budget: int | None = None  # Most tokens of reasoning; None: no bound.
    customs: frozenset[str] = frozenset()  # Names of the tools whose input is text.

    @property
    def parses(self) -> bool:
        """Whether the answer may contain calls or reasoning."""
        return self.parser is not None or self.tags is not None

    def params(self, params: SamplingParams, prompt_end: str, tokenizer: TokenTable) -> SamplingParams:
        """Returns the parameters of an answer to a prompt with this end. Raises InvalidRequest."""
        skips = params.skip_special_tokens and not self.shows_special  # Else the markers would be removed.
        answer = self.answer
        if self.tags is not None:
            beginning = beginning_of(self.tags, prompt_end)
            answer = with_reasoning(answer, self.tags, beginning, tokenizer, self.budget)
        return msgspec.structs.replace(params, structured_outputs=answer, skip_special_tokens=skips)

    def reader(self, prompt_end: str, *, eager: bool) -> AnswerReader:
        """Returns the reader of one answer to a prompt with this end."""
        parser = None if self.parser is None else self.parser(eager)
        if self.tags is not None:
            parser = ThinkingParser(self.tags, parser, is_open=beginning_of(self.tags, prompt_end) == "open")
        assert parser is not None
        return AnswerReader(parser, parallel=self.parallel, customs=self.customs)


class AnswerReader:
    """Reads the text, the reasoning and the calls of one answer.

    If not `parallel`, calls after the first are dropped. `customs` are the names of tools whose input is text.
    """

    def __init__(self, parser: ToolCallParser, *, parallel: bool, customs: frozenset[str] = frozenset()) -> None:
        self.has_called = False
        self._parser = parser
        self._parallel = parallel
        self._customs = customs
        self._inputs: dict[int, InputReader] = {}  # Readers of calls of custom tools, by the calls' indices.
        self.is_reasoning = False  # The text that came last is reasoning.

    def push(self, text: str) -> list[Event]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Event]:
        events = self._kept(self._parser.finish())
        rests = {index: reader.finish() for index, reader in self._inputs.items()}
        return [*events, *(CallArguments(index, rest, is_custom=True) for index, rest in rests.items() if rest)]

    def _kept(self, events: list[Event]) -> list[Event]:
        if events:
            self.is_reasoning = isinstance(events[-1], Reasoning)
        self.has_called = self.has_called or any(isinstance(event, CallStart) for event in events)
        if not self._parallel:
            events = [event for event in events if isinstance(event, Text | Reasoning) or event.index == 0]
        return self._with_inputs(events) if self._customs else events

    def _with_inputs(self, events: list[Event]) -> list[Event]:
        """Returns the events with the inputs of custom tools in place of their arguments."""
        made: list[Event] = []
        for event in events:
            if isinstance(event, CallStart) and event.name in self._customs:
                self._inputs[event.index] = InputReader()
                made.append(replace(event, is_custom=True))
            elif isinstance(event, CallArguments) and event.index in self._inputs:
                text = self._inputs[event.index].push(event.text)
                made += [CallArguments(event.index, text, is_custom=True)] if text else []
            else:
                made.append(event)
        return made


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""  # Or the input of a custom tool.
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    content: str | None  # None if there are only calls or reasoning.
    calls: list[Call]
    reasoning: str = ""


def read_answer(reader: AnswerReader, text: str) -> ParsedAnswer:
    """Reads a whole answer."""
    content, reasoning, calls = "", "", list[Call]()
    for event in [*reader.push(text), *reader.finish()]:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStart):
            calls.append(Call(event.id, event.name, is_custom=event.is_custom))
        else:
            calls[event.index].arguments += event.text
    return ParsedAnswer((content or None) if calls or reasoning else content, calls, reasoning)


def written_call(call: Call) -> dict[str, object]:
    """Returns a call as a chat message has it."""
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reasoning_fields(reasoning: str) -> dict[str, object]:
    """Returns the fields of a message or delta with reasoning: vLLM's name, and the one that DeepSeek introduced."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def delta_of(event: Event) -> dict[str, object]:
    """Returns the `delta` entry of a chat chunk for the event."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return reasoning_fields(event.text)
    if isinstance(event, CallArguments):
        piece = {"custom": {"input": event.text}} if event.is_custom else {"function": {"arguments": event.text}}
        return {"tool_calls": [{"index": event.index, **piece}]}
    if event.is_custom:
        custom = {"name": event.name, "input": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "custom", "custom": custom}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}


def read_tools(texts: TextService, model: ServedModel, body: ChatRequest, text: StructuredOutputs | None) -> ToolUse:
    """Reads the tools of a request. `text` is the format of answers that are not calls. Raises InvalidRequest.

    This takes a time that grows with the body: see access/long_work.py.
    """
    customs = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))
    offered, choice = _offered(body)
    tools = as_functions(offered)
    parallel = body.parallel_tool_calls is not False
    use = replace(_use_of(texts, model, tools, choice, parallel, text), customs=customs)
    if isinstance(body, ConvertedChat) and use.tags is not None and model.tokenizer.id_of(use.tags.closing) is not None:
        return replace(use, budget=body.thinking_wish)
    if body.thinking_token_budget is None:
        return use
    if use.tags is None:
        raise InvalidRequest(
            f"`{BUDGET}` needs a model that writes its reasoning between tags, and this model's chat template shows "
            "none; leave it out, or set `reasoning_effort` if the template reads it.",
            BUDGET,
        )
    return replace(use, budget=body.thinking_token_budget)


def _offered(body: ChatRequest) -> tuple[list[AnyTool], Choice]:
    """Returns the tools that the model may call, and whether it must call one of them. Raises InvalidRequest."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        return _allowed(tools, choice), choice.allowed_tools.mode
    if tools and isinstance(choice, NamedToolChoice | NamedCustomChoice):
        _check_named(tools, choice)
    return tools, choice


def _use_of(
    texts: TextService,
    model: ServedModel,
    tools: list[Tool],
    choice: Choice,
    parallel: bool,
    text: StructuredOutputs | None,
) -> ToolUse:
    functions = [tool.function for tool in tools]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "`tool_choice` requires a call, but `tools` names no function; give at least one.", "tools"
            )
        return _without_tools(texts, model, text)
    names = Counter(function.name for function in functions)
    [(most, times)] = names.most_common(1)
    if times > 1:
        raise InvalidRequest(f"`tools` has two functions named {most!r}; give each function its own name.", "tools")
    if choice == "none":
        return _without_tools(texts, model, text)
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
    known = texts.tool_format(model)
    new_id = openai_id if known is None else known.new_id
    if isinstance(choice, NamedToolChoice | NamedCustomChoice):
        return _with_tags(_named(functions, _name_of(choice), shown, new_id), texts, model)
    if choice == "required":
        schema = calls_schema({function.name: _parameters(function) for function in functions}, parallel=parallel)
        forced = structured_spec.json_schema(schema, "tools", any_whitespace=False)
        use = ToolUse(
            forced, shown, lambda _: RequiredCallsParser(Calls(names, eager=True, new_id=new_id)), parallel=parallel
        )
    else:
        use = _chosen(known, functions, model, shown, parallel, text)
    return _with_tags(use, texts, model)


def _without_tools(texts: TextService, model: ServedModel, text: StructuredOutputs | None) -> ToolUse:
    known = texts.tool_format(model)
    if known is None or not known.has_channels:
        return _with_tags(ToolUse(text), texts, model)
    special, answer = model.tokenizer.special_texts, text
    if text is not None and text.kind in ("json_schema", "json_object"):
        answer = Offer({}, special, text=text).constraint(known.grammar(Offer({}, special, text=text)))
    return ToolUse(
        answer, parser=lambda eager: known.make(Calls((), eager=eager)), shows_special=known.marker in special
    )


def _with_tags(use: ToolUse, texts: TextService, model: ServedModel) -> ToolUse:
    tags = texts.reasoning_tags(model)
    if tags is None or use.parses_channels:
        return use
    if use.answer is not None and not may_reason(use.answer):
        return use  # Such an answer begins at once, without reasoning.
    special = model.tokenizer.special_texts
    shows = use.shows_special or any(name and name in tag for tag in tags.all for name in special)
    return replace(use, tags=tags, shows_special=shows)


def _allowed(tools: list[AnyTool], choice: AllowedToolChoice) -> list[AnyTool]:
    for named in choice.allowed_tools.tools:
        _check_named(tools, named, "allows")
    names = {_name_of(named) for named in choice.allowed_tools.tools}
    return [tool for tool in tools if _name_of(tool) in names]


def _check_named(tools: list[AnyTool], choice: NamedToolChoice | NamedCustomChoice, verb: str = "names") -> None:
    """Raises InvalidRequest if no tool has the choice's type and name."""
    name = _name_of(choice)
    if not any((tool.type, _name_of(tool)) == (choice.type, name) for tool in tools):
        kind = "" if choice.type == "function" else "custom "
        raise InvalidRequest(f"`tool_choice` {verb} {name!r}, which is not one of the {kind}`tools`.", "tool_choice")


def _name_of(tool: Tool | CustomTool | NamedToolChoice | NamedCustomChoice) -> str:
    return tool.custom.name if isinstance(tool, CustomTool | NamedCustomChoice) else tool.function.name


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
        schemas = {function.name: function.parameters or {} for function in functions}
        calls = known.make(Calls(schemas, eager=eager, new_id=known.new_id, schemas=schemas))
        return calls if text is None or known.has_channels else FormattedParser(known.openings, calls)

    return ToolUse(
        answer,
        shown,
        parser,
        parallel=parallel,
        shows_special=known.marker in special,
        parses_channels=known.has_channels,
    )


def _named(functions: list[FunctionDefinition], name: str, shown: list[dict[str, Any]], new_id: NewId) -> ToolUse:
    function = next(function for function in functions if function.name == name)
    forced = structured_spec.json_schema(_parameters(function), "tools", any_whitespace=False)
    return ToolUse(
        forced, shown, lambda _: NamedCallParser(Calls([name], eager=True, new_id=new_id), name), parallel=False
    )


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

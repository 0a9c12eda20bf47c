"""Serves /v1/responses in its basic form: nothing is stored, so each request contains its whole conversation.

A request is converted to a chat request, and its answer is converted to OpenAI's items and events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.answer import answer_types
from lorafleet.api.answer.error_responses import http_error, in_own_words
from lorafleet.api.answer.generation import Sample, fallback_of, usage_of
from lorafleet.api.answer.logprobs import logprob_entries
from lorafleet.api.answer.responses import EventStream, WholeReply, json_response
from lorafleet.api.answer.streaming import fallback_headers
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_object, read_body
from lorafleet.api.request.request_bodies import (
    OUTPUT_LOGPROBS,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesAllowedChoice,
    ResponsesNamedChoice,
    ResponsesRequest,
    SampledRequest,
    TextFormat,
    ToolMode,
)
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.chat import StartedChat, count_prompt_tokens, start_chat
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.routes.responses_events import ResponseItems
from lorafleet.api.routes.responses_input import messages_of
from lorafleet.api.routes.tokenize import charge_auxiliary
from lorafleet.api.text.output import Delta
from lorafleet.api.tool_calls.parser import Event, Text
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest, LorafleetError

_CHAT_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens"}


@describe(
    "Responses",
    body=ResponsesRequest,
    answer=answer_types.ResponseBody,
    events=answer_types.ResponseEvent,
    headers=STARTING,
)
async def responses(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, ResponsesRequest)
    structured = _structured(body)
    _check_logprobs(body)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(_as_chat(body), ChatRequest))
        started = await start_chat(state, request, chat, deadline, "resp_", structured)
    except InvalidRequest as error:
        raise _in_its_own_words(error) from None
    answer = _Answer(state.config.base_id, body, started)
    if not body.stream:
        return WholeReply(answer.whole)
    headers: dict[str, str] = {}
    return EventStream(answer.stream(headers), headers)


@describe("Count the input tokens of a /v1/responses request", body=ResponsesRequest, answer=answer_types.InputTokens)
async def count_input_tokens(state: AppState, request: Request) -> Response:
    """Counts the input tokens of a request. Nothing is generated."""
    body = await read_body(state, request, ResponsesRequest)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(_as_chat(body), ChatRequest))
        num_tokens = await count_prompt_tokens(state, request, chat)
    except InvalidRequest as error:
        raise _in_its_own_words(error) from None
    charge_auxiliary(state, request, num_tokens)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


def _check_logprobs(body: ResponsesRequest) -> None:
    if body.top_logprobs is not None and not body.wants_logprobs:
        raise InvalidRequest(f"`top_logprobs` needs {OUTPUT_LOGPROBS!r} in `include`.", "top_logprobs")
    if body.wants_logprobs and body.tools and body.tool_choice != "none":
        raise InvalidRequest(
            f"`include` asks for {OUTPUT_LOGPROBS!r}, which are available only for text, but with `tools` the answer "
            "may be a call; set `tool_choice` to 'none', or leave one of the two out.",
            "include",
        )


def _as_chat(body: ResponsesRequest) -> dict[str, object]:
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    says_text = body.text is not None and isinstance(body.text.format, TextFormat)
    return {
        "messages": messages_of(body.input, body.instructions),
        "response_format": {"type": "text"} if says_text else None,  # This disables an adapter's default.
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": _chat_choice(body.tool_choice),
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        **{
            name: getattr(body, name)
            for name in ("model", "lora_weights", "parallel_tool_calls", "priority", "cache_salt", "request_id")
        },
        **{name: getattr(body, name) for name in SampledRequest.model_fields},
    }


def _chat_choice(choice: ToolMode | ResponsesNamedChoice | ResponsesAllowedChoice | None) -> object:
    if isinstance(choice, ResponsesNamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, ResponsesAllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _structured(body: ResponsesRequest) -> structured_spec.StructuredOutputs | None:
    given = None if body.text is None else body.text.format
    if isinstance(given, JsonSchemaFormat):
        return structured_spec.json_schema(given.schema_, "text.format.schema")
    return structured_spec.json_object("text.format") if isinstance(given, JsonObjectFormat) else None


def _in_its_own_words(error: InvalidRequest) -> InvalidRequest:
    field_name, dot, _ = (error.param or "").partition(".")
    if field_name == "messages" and dot:  # Items are not numbered as the messages are.
        return type(error)(error.message.replace(f"`{error.param}`", "`input`"), "input")
    return in_own_words(error, _CHAT_FIELDS)


@dataclass(slots=True)
class _Answer:
    base_id: str
    body: ResponsesRequest
    started: StartedChat
    items: ResponseItems = field(default_factory=ResponseItems)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def sample(self) -> Sample:
        return self.started.samples[0]

    async def whole(self) -> Response:
        final = Delta()
        async with aclosing(self._events(eager=False)) as events:
            async for event, delta in events:
                if event is not None:
                    self.items.add(event)
                final = delta
        self.items.close(_item_status(final))
        return json_response(self._response(final), fallback_headers(self.started.samples))

    async def stream(self, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        opened, final = False, Delta()
        try:
            async with aclosing(self._events(eager=True)) as events:
                async for event, delta in events:
                    final = delta
                    if not opened:
                        opened = True
                        headers.update(fallback_headers(self.started.samples))
                        for kind in ("response.created", "response.in_progress"):
                            yield self.items.event(kind, response=self._response(Delta()))
                    if event is not None:
                        yield self.items.add(event)
        except LorafleetError as error:
            if not opened:
                raise  # The error can still become an HTTP status.
            yield self.items.event("error", code=http_error(error).code, message=error.message, param=error.param)
            return
        response = self._response(final)
        closing = self.items.close(_item_status(final))
        yield closing + self.items.event(f"response.{response['status']}", response=self._response(final))

    async def _events(self, *, eager: bool) -> AsyncGenerator[tuple[Event | None, Delta], None]:
        """Yields each event with its delta, or None with a delta that has no event.

        The last item is None with the last delta.
        """
        reader = self.started.tools.reader(eager=eager) if self.started.tools.calls else None
        text = ""
        async with aclosing(self.sample.run()) as deltas:
            async for _, delta in deltas:
                text += delta.text
                if delta.logprobs:
                    self.items.add_logprobs(logprob_entries(self.sample.model.tokenizer, delta.logprobs, as_ids=False))
                if reader is None or eager:
                    found = [Text(delta.text)] if reader is None and delta.text else []
                    events: list[Event] = [*found, *(reader.push(delta.text) if reader is not None else [])]
                    if not events:
                        yield None, delta
                    for event in events:
                        yield event, delta
                final = delta
        if reader is not None:
            for event in [*([] if eager else reader.push(text)), *reader.finish()]:
                yield event, final
        yield None, final

    def _response(self, final: Delta) -> dict[str, object]:
        """Returns the JSON of the response. `final` has a finish_reason if the response has ended."""
        body, fallback = self.body, fallback_of(self.started.samples)
        status = "in_progress" if final.finish_reason is None else _item_status(final)
        return {
            "id": self.started.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.sample.model.name if fallback is None else self.base_id,
            "output": self.items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.sample.params.temperature,
            "text": (body.text.model_dump(by_alias=True, exclude_none=True) if body.text else None)
            or {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
            "tools": [
                {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()
            ],
            "top_p": self.sample.params.top_p,
            "truncation": "disabled",
            "usage": None if final.finish_reason is None else _usage(self.sample),
            **({} if fallback is None else {"lora_fallback": fallback}),
        }


def _item_status(final: Delta) -> str:
    return "incomplete" if final.finish_reason == "length" else "completed"


def _dumped(choice: object) -> object:
    return choice if isinstance(choice, str) else choice.model_dump()  # type: ignore[attr-defined]  # a pydantic model


def _usage(sample: Sample) -> dict[str, object]:
    usage = usage_of([sample])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},  # type: ignore[dict-item]
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }

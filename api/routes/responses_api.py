"""Serves /v1/responses by converting a request to a chat request, and its answer to OpenAI's items and events.

response_routes.py serves the responses that are stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.answer import responses_types
from lorafleet.api.answer.error_responses import SERVER_FAILED, http_error, in_own_words
from lorafleet.api.answer.generation import Sample, fallback_of, usage_of
from lorafleet.api.answer.logprobs import logprob_entries
from lorafleet.api.answer.responses import EventStream, WholeReply, encode_json, json_response
from lorafleet.api.answer.streaming import answer_headers
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_object, read_body
from lorafleet.api.request.request_bodies import ChatRequest, SampledRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.request.responses_bodies import (
    OUTPUT_LOGPROBS,
    PACKED_REASONING,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesAllowedChoice,
    ResponsesCustom,
    ResponsesFunction,
    ResponsesGrammarFormat,
    ResponsesNamedChoice,
    ResponsesRequest,
    TextFormat,
)
from lorafleet.api.request.tool_bodies import ToolMode
from lorafleet.api.routes.answer_events import answer_events
from lorafleet.api.routes.chat import StartedChat, count_prompt_tokens, start_chat
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.routes.response_storing import (
    Keeping,
    begin_run,
    check_store,
    claim_id,
    new_entry,
    read_history,
    stored_events,
)
from lorafleet.api.routes.responses_events import ResponseItems
from lorafleet.api.routes.responses_input import messages_of
from lorafleet.api.routes.tokenize import charge_auxiliary
from lorafleet.api.stored.response_query import ResponseQuery
from lorafleet.api.text.output import Delta
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest, LorafleetError
from lorafleet.protocol.transport.unread_outputs import TOKEN_BYTES

_CHAT_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning"}
_ID_PREFIX = "resp_"
_REASONING_FIELDS = ("thinking_token_budget", "chat_template_kwargs")


@describe(
    "Responses",
    body=ResponsesRequest,
    answer=responses_types.ResponseBody,
    events=responses_types.ResponseEvent,
    headers=STARTING,
)
async def responses(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, ResponsesRequest)
    structured = await run_by_size(state.long_work, request, lambda: _structured(body))
    _check_logprobs(body)
    check_store(state.stored, body)
    await claim_id(state, request, body, _ID_PREFIX)
    history = await read_history(state, request, body)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(_as_chat(body, history), ChatRequest))
        started = await start_chat(state, request, chat, deadline, _ID_PREFIX, structured)
    except InvalidRequest as error:
        raise _in_its_own_words(error) from None
    entry = await run_by_size(
        state.long_work, request, lambda: new_entry(state.stored, request, body, started.id, history)
    )
    keep = Keeping(state.stored.store, entry)
    summarizes = body.reasoning is not None and body.reasoning.summary is not None
    items = ResponseItems(summarizes=summarizes, packs_reasoning=PACKED_REASONING in (body.include or ()))
    repeated = await run_by_size(state.long_work, request, lambda: _repeated(body))
    answer = _Answer(state.config.base_id, body, repeated, started, items, keep, entry is not None)
    headers: dict[str, str] = {}
    if body.background:
        assert entry is not None
        await begin_run(state, request, answer, entry, streams=bool(body.stream))
        query = ResponseQuery(entry.owner, entry.response_id, "events")
        if not body.stream:
            return Response(answer.encoded(), media_type="application/json")
        return EventStream(stored_events(state.stored, query), headers)
    return EventStream(answer.stream(headers), headers) if body.stream else WholeReply(answer.whole)


@describe(
    "Count the input tokens of a /v1/responses request", body=ResponsesRequest, answer=responses_types.InputTokens
)
async def count_input_tokens(state: AppState, request: Request) -> Response:
    """Counts the input tokens of a request. Nothing is generated."""
    body = await read_body(state, request, ResponsesRequest)
    history = await read_history(state, request, body)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(_as_chat(body, history), ChatRequest))
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


def _as_chat(body: ResponsesRequest, history: bytes) -> dict[str, object]:
    """Returns the body of the chat request. `history` has the items before the request's own; empty if none."""
    before = messages_of(msgspec.json.decode(history), body.instructions) if history else None
    own = messages_of(body.input, body.instructions if before is None else None)
    tools = [_chat_tool(tool) for tool in body.tools or ()]
    says_text = body.text is not None and isinstance(body.text.format, TextFormat)
    return {
        "messages": [*(before or ()), *own],
        "response_format": {"type": "text"} if says_text else None,  # This disables an adapter's default.
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": _chat_choice(body.tool_choice),
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **{
            name: getattr(body, name)
            for name in (
                "model",
                "lora_weights",
                "parallel_tool_calls",
                "priority",
                "cache_salt",
                "request_id",
                *_REASONING_FIELDS,
            )
        },
        **{name: getattr(body, name) for name in SampledRequest.model_fields},
    }


def _chat_tool(tool: ResponsesFunction | ResponsesCustom) -> dict[str, object]:
    inner = tool.model_dump(exclude={"type"}, exclude_none=True)
    if isinstance(tool, ResponsesCustom) and isinstance(tool.format, ResponsesGrammarFormat):
        inner["format"] = {"type": "grammar", "grammar": tool.format.model_dump(exclude={"type"})}
    return {"type": tool.type, tool.type: inner}


def _chat_choice(choice: ToolMode | ResponsesNamedChoice | ResponsesAllowedChoice | None) -> object:
    if isinstance(choice, ResponsesNamedChoice):
        return {"type": choice.type, choice.type: {"name": choice.name}}
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
    repeated: dict[str, msgspec.Raw]  # The request's fields that the response has too, as JSON.
    started: StartedChat
    items: ResponseItems
    keep: Callable[[bytes], None]  # Stores the JSON of the response when it has ended.
    stores: bool
    num_reasoning_tokens: int = 0
    num_counted: int = 0  # Bytes of the answer that count with the request's body.
    token_ids: list[int] = field(default_factory=list)
    created_s: int = field(default_factory=lambda: int(time.time()))
    final: Delta = field(default_factory=Delta)  # Has a finish_reason if the response has ended.
    ended_early: str | None = None  # The status of a response that was canceled or has failed.
    failure: LorafleetError | None = None

    @property
    def sample(self) -> Sample:
        return self.started.samples[0]

    async def whole(self) -> Response:
        async with aclosing(self._deltas(eager=False)) as deltas:
            async for _ in deltas:
                self._count()
        self.items.close(self._item_status)
        content = self._end()
        return Response(content, headers=answer_headers(self.started.samples), media_type="application/json")

    async def stream(self, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        opened = False
        try:
            async with aclosing(self._deltas(eager=True, opening=self._opening)) as deltas:
                async for events in deltas:
                    self._count()
                    if not opened:
                        opened = True
                        headers.update(answer_headers(self.started.samples))
                    if events:
                        yield events
        except LorafleetError as error:
            if not opened:
                raise  # The error can still become an HTTP status.
            yield self.items.event("error", code=http_error(error).code, message=error.message, param=error.param)
            return
        yield self._closing()

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a response in the background, whose client may not be there."""
        yield self._opening()
        try:
            async with aclosing(self._deltas(eager=bool(self.body.stream))) as deltas:
                async for events in deltas:
                    yield events
        except LorafleetError as error:
            yield self.end_early("failed", error)
            return
        yield self._closing()

    def _count(self) -> None:
        """Counts what the answer has grown with the request's body. One in the background counts as stored instead."""
        counted, self.num_counted = self.num_counted, self.num_bytes
        self.sample.keep(self.num_counted - counted)

    @property
    def num_bytes(self) -> int:
        return self.items.num_bytes + TOKEN_BYTES * len(self.token_ids)

    def end_early(self, status: str, failure: LorafleetError | None = None) -> bytes:
        self.ended_early, self.failure = status, failure
        closing = self.items.close("incomplete")
        self._end()
        return closing + self.items.event(f"response.{status}", response=self._response())

    def encoded(self) -> bytes:
        return encode_json(self._response())

    def _opening(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join([self.items.event(kind, response=self._response()) for kind in kinds])

    def _closing(self) -> bytes:
        closing = self.items.close(self._item_status)
        self._end()
        response = self._response()
        return closing + self.items.event(f"response.{response['status']}", response=response)

    def _end(self) -> bytes:
        content = self.encoded()
        self.keep(content)
        return content

    async def _deltas(self, *, eager: bool, opening: Callable[[], bytes] = bytes) -> AsyncGenerator[bytes, None]:
        """Adds the answer to the items, and yields the events of each delta. `opening` writes the first events."""
        opened = False
        async with aclosing(answer_events(self.started, eager=eager)) as answered:
            async for events, delta, num_reasoning_tokens in answered:
                self.num_reasoning_tokens += num_reasoning_tokens
                if self.body.return_token_ids:
                    self.token_ids += delta.token_ids
                if delta.logprobs:
                    self.items.add_logprobs(logprob_entries(self.sample.model.tokenizer, delta.logprobs, as_ids=False))
                written = b"" if opened else opening()
                opened = True
                written += b"".join([self.items.add(event) for event in events])
                self.final = delta
                yield written

    @property
    def _item_status(self) -> str:
        return "incomplete" if self.final.finish_reason == "length" else "completed"

    @property
    def _status(self) -> str:
        if self.ended_early is not None:
            return self.ended_early
        return "in_progress" if self.final.finish_reason is None else self._item_status

    def _response(self) -> dict[str, object]:
        body, fallback, status = self.body, fallback_of(self.started.samples), self._status
        return {
            "id": self.started.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": bool(body.background),
            "error": self._error(),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_output_tokens": body.max_output_tokens,
            "model": self.sample.model.name if fallback is None else self.base_id,
            "output": self.items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": None if body.reasoning is None else {"summary": None, **body.reasoning.model_dump()},
            "store": self.stores,
            "temperature": self.sample.params.temperature,
            **self.repeated,
            "top_p": self.sample.params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else _usage(self.sample, self.num_reasoning_tokens),
            **({} if fallback is None else {"lora_fallback": fallback}),
            **({} if status == "in_progress" else self.sample.weight_versions()),
            **self._tokens(status),
        }

    def _tokens(self, status: str) -> dict[str, object]:
        """Returns the tokens of prompt and answer, if the request wants them, once the response has ended."""
        if not self.body.return_token_ids or status == "in_progress":
            return {}
        return {"prompt_token_ids": self.sample.prompt.token_ids, "token_ids": self.token_ids}

    def _error(self) -> dict[str, str] | None:
        if self.ended_early != "failed":
            return None
        if self.failure is None:
            return {"code": "server_error", "message": SERVER_FAILED}
        return {"code": http_error(self.failure).code or "server_error", "message": self.failure.message}


def _repeated(body: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Returns the fields of a request that its response repeats in several events, encoded once."""
    fields: dict[str, object] = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": (body.text.model_dump(by_alias=True, exclude_none=True) if body.text else None)
        or {"format": {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
        "tools": [
            ({"strict": None, "parameters": None} if tool.type == "function" else {})
            | tool.model_dump(exclude_none=True)
            for tool in body.tools or ()
        ],
    }
    return {name: msgspec.Raw(encode_json(value)) for name, value in fields.items()}


def _dumped(choice: object) -> object:
    return choice if isinstance(choice, str) else choice.model_dump()  # type: ignore[attr-defined]  # a pydantic model


def _usage(sample: Sample, num_reasoning_tokens: int) -> dict[str, object]:
    usage = usage_of([sample])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},  # type: ignore[dict-item]
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }

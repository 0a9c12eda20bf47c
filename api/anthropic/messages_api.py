"""Serves Anthropic's /v1/messages and /v1/messages/count_tokens.

A request is converted to a chat request, and its answer is converted to Anthropic's content blocks and events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.answer import anthropic_types
from lorafleet.api.answer.generation import Sample, fallback_of
from lorafleet.api.answer.responses import EventStream, WholeReply, json_response
from lorafleet.api.answer.streaming import answer_headers
from lorafleet.api.anthropic.message_blocks import MessageBlocks, named_event
from lorafleet.api.anthropic.message_bodies import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from lorafleet.api.anthropic.message_input import as_chat, check_effort, in_anthropics_words, output_format
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_object, read_body
from lorafleet.api.request.request_bodies import ConvertedChat
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.answer_events import answer_events
from lorafleet.api.routes.chat import StartedChat, count_prompt_tokens, start_chat
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.routes.tokenize import charge_auxiliary
from lorafleet.api.text.output import Delta
from lorafleet.protocol.errors import InvalidRequest

REQUEST_ID_HEADER = "request-id"  # Anthropic's clients show it in their errors and logs.


@describe(
    "Messages, as in Anthropic's API",
    body=MessagesRequest,
    answer=anthropic_types.AnthropicAnswer,
    events=anthropic_types.AnthropicEvent,
    headers=STARTING,
)
async def messages(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, MessagesRequest)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(as_chat(body), ConvertedChat))
        format = await run_by_size(state.long_work, request, lambda: output_format(body))
        started = await start_chat(state, request, chat, deadline, "msg_", format, limits_answer_to_room=True)
    except InvalidRequest as error:
        raise in_anthropics_words(error) from None
    check_effort(body, state.texts.chat_template_of(started.samples[0].model))
    answer = _MessageAnswer(state.config.base_id, body, started)
    if not body.stream:
        return WholeReply(answer.whole)
    headers: dict[str, str] = {}
    return EventStream(answer.stream(headers), headers)


@describe(
    "Count the input tokens of a /v1/messages request",
    body=CountTokensRequest,
    answer=anthropic_types.AnthropicTokenCount,
)
async def count_message_tokens(state: AppState, request: Request) -> Response:
    """Counts the input tokens of a request. Nothing is generated."""
    body = await read_body(state, request, CountTokensRequest)
    try:
        chat = await run_by_size(state.long_work, request, lambda: parse_object(as_chat(body), ConvertedChat))
        num_tokens = await count_prompt_tokens(state, request, chat)
    except InvalidRequest as error:
        raise in_anthropics_words(error) from None
    charge_auxiliary(state, request, num_tokens)
    return json_response({"input_tokens": num_tokens})


@dataclass(frozen=True, slots=True)
class _MessageAnswer:
    """The answer to one request, whole or streamed."""

    base_id: str
    body: MessagesRequest
    started: StartedChat

    @property
    def sample(self) -> Sample:
        return self.started.samples[0]

    async def whole(self) -> Response:
        blocks, final = self._blocks(), Delta()
        async with aclosing(answer_events(self.started, eager=False)) as answered:
            async for events, delta, _ in answered:
                for event in events:
                    blocks.add(event)
                final = delta
        blocks.close()
        content = {**self._message(), "content": blocks.blocks, **self._ending(final, blocks)}
        return json_response(content | {"usage": self._usage()}, self._headers())

    async def stream(self, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        blocks, final, opened = self._blocks(), Delta(), False
        async with aclosing(answer_events(self.started, eager=True)) as answered:
            async for events, delta, _ in answered:
                written = b""
                if not opened:
                    opened = True
                    headers.update(self._headers())
                    written = self._opening()
                written += b"".join([blocks.add(event) for event in events])
                if written:
                    yield written
                final = delta
        delta_fields = self._ending(final, blocks)
        yield (
            blocks.close()
            + named_event("message_delta", delta=delta_fields, usage=self._usage())
            + named_event("message_stop")
        )

    def _opening(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event("message_start", message=message) + named_event("ping")

    def _blocks(self) -> MessageBlocks:
        thinking = self.body.thinking
        omitted = isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"
        return MessageBlocks(shows_reasoning=not isinstance(thinking, ThinkingDisabled), omits_reasoning=omitted)

    def _message(self) -> dict[str, object]:
        """Returns the fields that are known once the model has begun to answer."""
        fallback = fallback_of(self.started.samples)
        return {
            "id": self.started.id,
            "type": "message",
            "role": "assistant",
            "model": self.sample.model.name if fallback is None else self.base_id,
            **({} if fallback is None else {"lora_fallback": fallback}),
        }

    def _ending(self, final: Delta, blocks: MessageBlocks) -> dict[str, str | None]:
        reason, stop = "end_turn", None
        if final.finish_reason == "length":
            is_room = self.sample.params.max_tokens != self.body.max_tokens
            reason = "model_context_window_exceeded" if is_room else "max_tokens"
        elif blocks.has_called:
            reason = "tool_use"
        elif isinstance(final.stop_reason, str):
            reason, stop = "stop_sequence", final.stop_reason
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, object]:
        """Returns the usage, where tokens from the cache are not input tokens, as in Anthropic's API."""
        num_cached = self.sample.num_cached_tokens
        return {
            "input_tokens": len(self.sample.prompt.token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.sample.num_tokens,
        }

    def _headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.started.id, **answer_headers(self.started.samples)}

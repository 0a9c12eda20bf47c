"""Declares the answers of /v1/messages, in Anthropic's form."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

from lorafleet.api.answer.answer_types import Fallback, exactly


@exactly
class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


@exactly
class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


@exactly
class AnthropicText(TypedDict):
    type: Literal["text"]
    text: str


@exactly
class AnthropicThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@exactly
class AnthropicToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@exactly
class AnthropicUsage(TypedDict):
    input_tokens: int  # Without those that were read from the cache.
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


@exactly
class AnthropicAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage
    lora_fallback: NotRequired[Fallback]


class AnthropicEvent(TypedDict):
    """An event of a stream. Its other members are those of Anthropic's event of that type."""

    type: str


@exactly
class AnthropicTokenCount(TypedDict):
    input_tokens: int

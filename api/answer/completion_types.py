"""Declares the answers of /v1/completions and /v1/chat/completions, and the chunks of their streams."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

from lorafleet.api.answer.answer_types import CommonFields, FinishReason, Usage, WeightSpan, exactly


@exactly
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]
    weight_versions: NotRequired[list[WeightSpan]]
    routed_experts: NotRequired[str]


@exactly
class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


@exactly
class Completion(CommonFields):
    """The answer of /v1/completions. A stream has it as chunks, with `usage` if the request asked for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


@exactly
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@exactly
class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@exactly
class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


@exactly
class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


@exactly
class ToolCall(TypedDict):
    """A call of a function. In a stream, `id`, `type` and `name` are in its first chunk, and `index` is in all."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


@exactly
class CalledCustomTool(TypedDict):
    name: NotRequired[str]
    input: str


@exactly
class CustomToolCall(TypedDict):
    """A call of a custom tool. In a stream, `id`, `type` and `name` are in its first chunk, and `index` is in all."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: CalledCustomTool


@exactly
class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # The same text.
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


@exactly
class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # The same text.
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


@exactly
class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


@exactly
class ChatChunkChoice(Choice):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


@exactly
class ChatCompletion(CommonFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[Any]]
    prompt_token_ids: NotRequired[list[int]]


@exactly
class ChatCompletionChunk(CommonFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]

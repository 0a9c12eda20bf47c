"""Declares the JSON of every answer as types. /openapi.json is made from them, and tests check real answers with them.

Routes build plain dicts instead, because these cost less per token.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

_exactly = with_config(ConfigDict(extra="forbid"))

FinishReason = Literal["stop", "length", "abort", "error"]
Fallback = dict[str, str]  # Keys: requested, reason. The base model answered in an adapter's place.


@_exactly
class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@_exactly
class ErrorBody(TypedDict):
    error: Error


@_exactly
class PromptTokensDetails(TypedDict):
    cached_tokens: int


@_exactly
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@_exactly
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_exactly
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@_exactly
class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


@_exactly
class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


@_exactly
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Literal[0]


@_exactly
class OutputTokensDetails(TypedDict):
    reasoning_tokens: Literal[0]


@_exactly
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@_exactly
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@_exactly
class ResponseBody(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    lora_fallback: NotRequired[Fallback]


@_exactly
class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(TypedDict):
    """An event of a stream. Its other members are those of OpenAI's event of that type."""

    type: str
    sequence_number: int


@_exactly
class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@_exactly
class Embedding(TypedDict):
    """One embedding, as numbers or as the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@_exactly
class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    lora_fallback: NotRequired[Fallback]


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]


@_exactly
class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CommonFields(TypedDict):
    id: str
    created: int
    model: str
    lora_fallback: NotRequired[Fallback]


@_exactly
class Completion(CommonFields):
    """The answer of /v1/completions. A stream has it as chunks, with `usage` if the request asked for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


@_exactly
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@_exactly
class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@_exactly
class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


@_exactly
class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


@_exactly
class ToolCall(TypedDict):
    """A call of a function. In a stream, `id`, `type` and `name` are in its first chunk, and `index` is in all."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


@_exactly
class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


@_exactly
class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@_exactly
class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


@_exactly
class ChatChunkChoice(Choice):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


@_exactly
class ChatCompletion(CommonFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[Any]]
    prompt_token_ids: NotRequired[list[int]]


@_exactly
class ChatCompletionChunk(CommonFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


@_exactly
class GenerateMeta(TypedDict):
    """The metadata of an SGLang answer. The entries of its lists are [logprob, token ID, text]."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    lora_fallback: NotRequired[Fallback]
    input_token_logprobs: NotRequired[list[Any]]
    output_token_logprobs: NotRequired[list[Any]]
    input_top_logprobs: NotRequired[list[Any]]
    output_top_logprobs: NotRequired[list[Any]]


@_exactly
class Generated(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: NotRequired[int]  # Only in a stream of several answers.


@_exactly
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


@_exactly
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


@_exactly
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@_exactly
class Detokenized(TypedDict):
    prompt: str


@_exactly
class ServerVersion(TypedDict):
    version: str

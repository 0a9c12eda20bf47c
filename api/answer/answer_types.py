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
class WeightSpan(TypedDict):
    """Generated tokens from `start` to before `end`, and the weights that sampled them."""

    version: str | None
    digest: str | None
    start: int
    end: int


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
class OutputCustomCall(TypedDict):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    input: str
    status: Literal["in_progress", "completed", "incomplete"]


@_exactly
class ReasoningText(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


@_exactly
class OutputReasoning(TypedDict):
    """The reasoning is in `summary` if the request asked for a summary, else in `content`."""

    type: Literal["reasoning"]
    id: str
    summary: list[ReasoningText]
    content: NotRequired[list[ReasoningText]]
    encrypted_content: NotRequired[str]
    status: Literal["in_progress", "completed", "incomplete"]


@_exactly
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Literal[0]


@_exactly
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


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
class ResponseFault(TypedDict):
    code: str
    message: str


@_exactly
class ResponseBody(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputCustomCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None] | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    lora_fallback: NotRequired[Fallback]
    weight_versions: NotRequired[list[WeightSpan]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


@_exactly
class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@_exactly
class InputItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]  # Each item has at least an ID, a type and a status.
    first_id: str | None
    last_id: str | None
    has_more: bool


@_exactly
class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(TypedDict):
    """An event of a stream. Its other members are those of OpenAI's event of that type."""

    type: str
    sequence_number: int


@_exactly
class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


@_exactly
class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


@_exactly
class AnthropicText(TypedDict):
    type: Literal["text"]
    text: str


@_exactly
class AnthropicThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@_exactly
class AnthropicToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@_exactly
class AnthropicUsage(TypedDict):
    input_tokens: int  # Without those that were read from the cache.
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


@_exactly
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


@_exactly
class AnthropicTokenCount(TypedDict):
    input_tokens: int


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


class CommonFields(TypedDict):
    id: str
    created: int
    model: str
    lora_fallback: NotRequired[Fallback]


@_exactly
class TextClass(TypedDict):
    index: int
    label: str  # The most likely class.
    probs: list[float]
    num_classes: int


@_exactly
class Classes(CommonFields):
    object: Literal["list"]
    data: list[TextClass]
    usage: Usage


@_exactly
class PooledEntry(TypedDict):
    """An embedding, a head's outputs, or its outputs for each token; or the bytes of their float32 in base64."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


@_exactly
class PooledList(CommonFields):
    object: Literal["list"]
    data: list[PooledEntry]
    usage: Usage


@_exactly
class PairScore(TypedDict):
    object: Literal["score"]
    index: int
    score: float


@_exactly
class Scores(CommonFields):
    object: Literal["list"]
    data: list[PairScore]
    usage: Usage


@_exactly
class DocumentText(TypedDict):
    text: str


@_exactly
class RankedDocument(TypedDict):
    index: int  # The document's place in the request.
    document: NotRequired[DocumentText]
    relevance_score: float


@_exactly
class Ranking(TypedDict):
    """The answer of /rerank, best documents first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedDocument]
    lora_fallback: NotRequired[Fallback]


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]
    weight_versions: NotRequired[list[WeightSpan]]
    routed_experts: NotRequired[str]


@_exactly
class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


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
class CalledCustomTool(TypedDict):
    name: NotRequired[str]
    input: str


@_exactly
class CustomToolCall(TypedDict):
    """A call of a custom tool. In a stream, `id`, `type` and `name` are in its first chunk, and `index` is in all."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: CalledCustomTool


@_exactly
class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # The same text.
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


@_exactly
class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # The same text.
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


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
    weight_versions: NotRequired[list[WeightSpan]]
    routed_experts: NotRequired[str]
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


@_exactly
class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: Literal[False]
    has_audio_understanding: Literal[False]


@_exactly
class ServerInfo(TypedDict):
    vllm_config: dict[str, Any] | str


@_exactly
class WorldSize(TypedDict):
    world_size: int


@_exactly
class Status(TypedDict):
    status: str


@_exactly
class StatusMessage(Status):
    message: str


@_exactly
class Paused(TypedDict):
    is_paused: bool


@_exactly
class Sleeping(TypedDict):
    is_sleeping: bool


@_exactly
class GroupStatus(TypedDict):
    success: Literal[True]
    message: str


@_exactly
class LoadedAdapters(TypedDict):
    success: Literal[True]
    error_message: str
    loaded_adapters: dict[str, str]  # Names and places of the adapters that the call has loaded.


@_exactly
class GeneratedTokensChoice(TypedDict):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    weight_versions: NotRequired[list[WeightSpan]]
    routed_experts: NotRequired[str]


@_exactly
class GeneratedTokens(TypedDict):
    """The answer of /inference/v1/generate, or a chunk of its stream."""

    request_id: str
    model: str
    choices: list[GeneratedTokensChoice]
    prompt_logprobs: NotRequired[list[Any] | None]
    usage: NotRequired[Usage | None]
    lora_fallback: NotRequired[Fallback]


@_exactly
class RenderedChat(TypedDict):
    """A body for /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    lora_weights: NotRequired[list[float]]
    cache_salt: NotRequired[str]
    priority: NotRequired[int]
    return_weight_versions: NotRequired[bool]
    return_routed_experts: NotRequired[bool]
    weight_version: NotRequired[int]
    min_weight_version: NotRequired[int]

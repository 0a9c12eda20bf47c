"""Declares the answers of the routes that work with token ids: vLLM's and SGLang's generation, and tokenizing."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

from lorafleet.api.answer.answer_types import Fallback, FinishReason, Usage, WeightSpan, exactly
from lorafleet.api.answer.completion_types import ChatLogprobs


@exactly
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


@exactly
class Generated(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: NotRequired[int]  # Only in a stream of several answers.


@exactly
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@exactly
class Detokenized(TypedDict):
    prompt: str


@exactly
class GeneratedTokensChoice(TypedDict):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    weight_versions: NotRequired[list[WeightSpan]]
    routed_experts: NotRequired[str]


@exactly
class GeneratedTokens(TypedDict):
    """The answer of /inference/v1/generate, or a chunk of its stream."""

    request_id: str
    model: str
    choices: list[GeneratedTokensChoice]
    prompt_logprobs: NotRequired[list[Any] | None]
    usage: NotRequired[Usage | None]
    lora_fallback: NotRequired[Fallback]


@exactly
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

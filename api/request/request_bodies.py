"""Declares the bodies of completions and chats, with the fields that this server acts on; fields.py has the others.

Types are strict, and null means the default. Bounds come from protocol/limits.py. Rules for several fields together
are checked by the route that reads them. This holds for the other *_bodies modules as well.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lorafleet.api.request.body_fields import (
    AllowedIds,
    BadWords,
    Choices,
    LogitBias,
    MaxThinking,
    MaxTokens,
    Messages,
    MinP,
    MinTokens,
    ModelName,
    N,
    NumLogprobs,
    Penalty,
    Priority,
    Prompts,
    RepetitionPenalty,
    RequestId,
    Salt,
    Seed,
    Source,
    Stop,
    StopIds,
    Temperature,
    TemplateArguments,
    TopK,
    TopP,
    Truncation,
    Version,
    Weights,
)
from lorafleet.api.request.bounds import AtMost
from lorafleet.api.request.fields import Strict, Tolerant
from lorafleet.api.request.structured_fields import JSONSchema, ResponseFormat, StructuredOutputsRequest
from lorafleet.api.request.tool_bodies import AnyTool, ToolChoice, ToolMode
from lorafleet.protocol import limits
from lorafleet.protocol.limits import LogprobsMode


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SampledRequest(Tolerant):
    """The fields that say how tokens are sampled and where an answer ends."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: MinTokens | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: LogprobsMode | None = None  # The probabilities whose logarithms are returned; default: the server's.
    return_weight_versions: bool | None = None  # Names the version and digest that sampled each token.
    weight_version: Version | None = None  # The only version that may answer.
    min_weight_version: Version | None = None  # The least version that may answer.


class GenerationRequest(SampledRequest):
    """The fields that completions and chat share."""

    model: ModelName | None = None
    lora_weights: Weights | None = None  # Weights of mixed adapters ("a+b"), in their order in `model`.
    n: N | None = None
    best_of: N | None = None  # Must equal n.
    max_tokens: MaxTokens | None = None
    prompt_logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None  # Keeps the last k tokens; -1 keeps as many as fit.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None  # Lower values start sooner.
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None  # For bases with experts, if the server records them.
    return_tokens_as_token_ids: bool | None = None
    request_id: RequestId | None = None
    cache_salt: Salt | None = Field(None, min_length=1)
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputsRequest | None = None
    guided_json: JSONSchema = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: NumLogprobs | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest):
    messages: Messages = Field(min_length=1)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[AnyTool], AtMost(limits.MAX_TOOLS)] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # False allows one call at most.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: ReasoningEffort | None = None  # An argument of the chat template.
    thinking_token_budget: MaxThinking | None = None  # Most tokens of reasoning; then its end is forced.


class ConvertedChat(ChatRequest):
    """A chat request made from a request of another API, whose clients do not know what the model can do."""

    template_wishes: TemplateArguments | None = None  # Arguments for a template that reads them.
    thinking_wish: MaxThinking | None = None  # thinking_token_budget of a model that can be held to one.

"""Declares the bodies of Anthropic's /v1/messages and /v1/messages/count_tokens.

Types are strict, and null means the default. A block that is not text, a call, its result or reasoning is refused by
its place in the body.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lorafleet.api.request.body_fields import (
    Description,
    Label,
    MaxTokens,
    ModelName,
    Object,
    Priority,
    RequestId,
    Salt,
    StopText,
    Temperature,
    TemplateArguments,
    Text,
    ToolName,
    TopK,
    TopP,
    Weights,
)
from lorafleet.api.request.bounds import AtMost, Within, over_bound
from lorafleet.api.request.fields import Strict
from lorafleet.protocol import limits

BudgetTokens = Annotated[int, Within(limits.BUDGET_TOKENS)]
Nothing = Annotated[list[None], Field(max_length=0)]  # An empty list.

_UNREADABLE = {"image", "document", "search_result", "container_upload", "redacted_thinking"}


class CacheControl(Strict):
    """A mark of a prefix to cache, which has no effect because every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Strict):
    cache_control: CacheControl | None = None


class DirectCaller(Strict):
    type: Literal["direct"]


class TextBlock(Cacheable):
    type: Literal["text"]
    text: Text
    citations: Nothing | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: Text
    signature: Text  # Not checked, because a client may write any text as the assistant's.


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Label
    name: ToolName
    input: Object
    caller: DirectCaller | None = None
    toolset_name: None = None


def _readable(given: object) -> object:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind in _UNREADABLE:
        raise over_bound(f"has the type {kind!r}, but this model reads text only; remove the block")
    return given


_Readable = BeforeValidator(_readable)
ResultBlocks = Annotated[list[Annotated[TextBlock, _Readable]], AtMost(limits.MAX_PARTS_OF_ONE)]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Text | ResultBlocks | None = None
    is_error: bool | None = None
    toolset_name: None = None


Block = Annotated[
    Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")], _Readable
]
Blocks = Annotated[list[Block], AtMost(limits.MAX_PARTS_OF_ONE)]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class AnthropicTool(Cacheable):
    type: Literal["custom"] | None = None
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    input_schema: Object
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # Has no effect: arguments are always streamed as they come.
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], AtMost(1)] | None = None
    input_examples: Nothing | None = None


class AnyChoice(Strict):
    """The choice `auto` or `any`."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(Strict):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Strict):
    type: Literal["none"]


AnthropicToolChoice = Annotated[AnyChoice | OneToolChoice | NoToolChoice, Field(discriminator="type")]


class ThinkingEnabled(Strict):
    type: Literal["enabled"]
    budget_tokens: BudgetTokens  # Holds for models whose reasoning ends with one token.
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Strict):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Strict):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class JsonOutput(Strict):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class KeepThinking(Strict):
    """The one edit of a context that asks for what happens in any case."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    edits: Annotated[list[KeepThinking], AtMost(1)] | None = None


class MessageMetadata(Strict):
    user_id: Label | None = None  # Has no effect.


class CountTokensRequest(Strict):
    """The fields that determine a prompt."""

    model: ModelName | None = None
    messages: Annotated[list[AnthropicMessage], AtMost(limits.MAX_MESSAGES)] = Field(min_length=1)
    system: Text | ResultBlocks | None = None
    tools: Annotated[list[AnthropicTool], AtMost(limits.MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Nothing | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: TemplateArguments | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[StopText], AtMost(limits.MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # There is only the standard tier.
    container: None = None
    diagnostics: None = None
    inference_geo: None = None
    lora_weights: Weights | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None

"""Declares the answers of /v1/responses and its items."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

from lorafleet.api.answer.answer_types import Fallback, WeightSpan, exactly


@exactly
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@exactly
class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


@exactly
class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


@exactly
class OutputCustomCall(TypedDict):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    input: str
    status: Literal["in_progress", "completed", "incomplete"]


@exactly
class ReasoningText(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


@exactly
class OutputReasoning(TypedDict):
    """The reasoning is in `summary` if the request asked for a summary, else in `content`."""

    type: Literal["reasoning"]
    id: str
    summary: list[ReasoningText]
    content: NotRequired[list[ReasoningText]]
    encrypted_content: NotRequired[str]
    status: Literal["in_progress", "completed", "incomplete"]


@exactly
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Literal[0]


@exactly
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@exactly
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@exactly
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@exactly
class ResponseFault(TypedDict):
    code: str
    message: str


@exactly
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


@exactly
class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@exactly
class InputItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]  # Each item has at least an ID, a type and a status.
    first_id: str | None
    last_id: str | None
    has_more: bool


@exactly
class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(TypedDict):
    """An event of a stream. Its other members are those of OpenAI's event of that type."""

    type: str
    sequence_number: int

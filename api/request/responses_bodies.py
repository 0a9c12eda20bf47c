"""Declares the body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lorafleet.api.request.body_fields import (
    TEXT_SCHEMA,
    Description,
    Label,
    MaxThinking,
    MaxTokens,
    Metadata,
    ModelName,
    NumLogprobs,
    Object,
    Priority,
    RequestId,
    Salt,
    TemplateArguments,
    Text,
    ToolName,
    Weights,
    with_schema,
)
from lorafleet.api.request.bounds import AtMost
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.request_bodies import ReasoningEffort, SampledRequest
from lorafleet.api.request.tool_bodies import TextToolFormat, ToolGrammar, ToolMode
from lorafleet.api.routes.responses_input import ITEM_SCHEMA
from lorafleet.protocol import limits


class ResponsesFunction(Strict):
    """A tool in the flat form of /v1/responses."""

    type: Literal["function"]
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    parameters: Object | None = None
    strict: bool | None = None


class ResponsesGrammarFormat(ToolGrammar):
    type: Literal["grammar"]


class ResponsesCustom(Strict):
    """A custom tool in the flat form of /v1/responses."""

    type: Literal["custom"]
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    format: Annotated[TextToolFormat | ResponsesGrammarFormat, Field(discriminator="type")] | None = None


class ResponsesNamedChoice(Strict):
    type: Literal["function", "custom"]
    name: ToolName


class ResponsesAllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedChoice], AtMost(limits.MAX_TOOLS)] = Field(min_length=1)


ResponsesToolChoice = Annotated[ResponsesNamedChoice | ResponsesAllowedChoice, Field(discriminator="type")]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Label
    schema_: Object = Field(alias="schema")
    description: Description | None = None
    strict: bool | None = None  # The schema is enforced in any case.


class ResponsesText(Strict):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    verbosity: Literal["medium"] | None = None  # OpenAI's default; models here support no other.


class ResponsesReasoning(Strict):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "detailed"] | None = None  # The whole reasoning takes the place of a summary.


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


OUTPUT_LOGPROBS = "message.output_text.logprobs"
PACKED_REASONING = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]

_ITEMS = {"type": "array", "items": ITEM_SCHEMA, "minItems": 1, "maxItems": limits.MAX_MESSAGES}


class ResponsesRequest(SampledRequest):
    model: ModelName | None = None
    return_token_ids: bool | None = None
    lora_weights: Weights | None = None
    input: Annotated[Any, with_schema(anyOf=[TEXT_SCHEMA, _ITEMS])]
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    thinking_token_budget: MaxThinking | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: (
        Annotated[
            list[Annotated[ResponsesFunction | ResponsesCustom, Field(discriminator="type")]], AtMost(limits.MAX_TOOLS)
        ]
        | None
    ) = None
    tool_choice: ToolMode | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None  # Returned unchanged.
    store: bool | None = None  # Default: true, unless the server stores nothing.
    previous_response_id: Label | None = None  # Its conversation precedes `input`.
    background: bool | None = None
    include: Annotated[list[Includable], AtMost(limits.MAX_INCLUDED)] | None = (
        None  # All except the logprobs and the reasoning concern items that no answer here has.
    )
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())

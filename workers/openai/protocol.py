"""The request bodies, as far as this server acts on them; fields.py has the other fields.

Types are strict and null means the default. Bounds are SamplingParams' own; what spans several fields is checked by
the route that reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from lorafleet.workers.openai.fields import Strict, Tolerant, tolerated
from lorafleet.workers.openai.messages import MESSAGE_SCHEMA
from lorafleet.workers.openai.responses_input import ITEM_SCHEMA


def _schema(**schema: Any) -> WithJsonSchema:
    """Of a field that its route checks itself, since pydantic's errors for unions of lists name no place."""
    return WithJsonSchema(schema)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_MANY_TOKEN_IDS = {"type": "array", "items": _TOKEN_IDS, "minItems": 1}
_ONE_OR_MANY = [{"type": "string"}, _TEXTS, _TOKEN_IDS, _MANY_TOKEN_IDS]
_NULL = {"type": "null"}

Prompts = Annotated[Any, _schema(anyOf=_ONE_OR_MANY)]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


_JSON_SCHEMA = [{"type": "object"}, {"type": "boolean"}, {"type": "string", "description": "The same as JSON text."}]
_FORMAT_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "schema": {"anyOf": _JSON_SCHEMA},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
    "additionalProperties": False,
}
_STRUCTURE = {
    "type": "object",
    "properties": {
        "begin": {"type": "string"},
        "schema": {"type": ["object", "boolean"]},
        "end": {"type": "string"},
    },
    "required": ["begin", "schema", "end"],
    "additionalProperties": False,
}
_PARTS = ["const_string", "any_text", "json_schema", "tag", "sequence", "or", "triggered_tags", "tags_with_separator"]
_STRUCTURAL_FORMAT = {"type": "object", "properties": {"type": {"enum": _PARTS}}, "required": ["type"]}
_RESPONSE_FORMATS = [
    {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "json_schema": _FORMAT_SCHEMA},
        "required": ["type", "json_schema"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "structural_tag"},
            "triggers": _TEXTS,
            "structures": {"type": "array", "items": _STRUCTURE, "minItems": 1},
        },
        "required": ["type", "triggers", "structures"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"type": {"const": "structural_tag"}, "format": _STRUCTURAL_FORMAT},
        "required": ["type", "format"],
        "additionalProperties": False,
    },
]

JSONSchema = Annotated[Any, _schema(anyOf=[*_JSON_SCHEMA, _NULL])]
ResponseFormat = Annotated[Any, _schema(anyOf=[*_RESPONSE_FORMATS, _NULL])]


class StructuredOutputsRequest(Strict):
    """vLLM's. disable_fallback: there is no other backend to fall back to."""

    json_: JSONSchema = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None  # JSON text of response_format's form
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class SampledRequest(Tolerant):
    """How tokens are drawn, and where they end."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None


class GenerationRequest(SampledRequest):
    """What completions and chat share."""

    model: str | None = None
    lora_weights: list[float | int] | None = None  # where model mixes adapters, "a+b": of each, in the order named
    n: int | None = None
    best_of: int | None = None  # must equal n
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # keeps the last k; -1: as many as fit
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None  # the lower, the sooner
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputsRequest | None = None
    guided_json: JSONSchema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None


class FunctionDefinition(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; without one the function takes nothing
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1)


class AllowedToolChoice(Strict):
    """The model is shown these of `tools` alone."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(Tolerant):
    model: str | None = None
    lora_weights: list[float | int] | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # the first so many numbers, brought to length 1 again
    pooling: Literal["last", "mean"] | None = None  # default: the server's
    normalize: bool | None = None  # to length 1; default: true
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # keeps the last k; -1: as many as fit
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class ResponsesFunction(Strict):
    """A tool as /v1/responses has it: flat."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedChoice(Strict):
    type: Literal["function"]
    name: str


class ResponsesAllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponsesNamedChoice] = Field(min_length=1)


ResponsesToolChoice = Annotated[ResponsesNamedChoice | ResponsesAllowedChoice, Field(discriminator="type")]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None  # the schema is kept to either way


class ResponsesText(Strict):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    verbosity: Literal["medium"] | None = None  # OpenAI's default; models here know no other


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


OUTPUT_LOGPROBS = "message.output_text.logprobs"
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


class ResponsesRequest(SampledRequest):
    model: str | None = None
    lora_weights: list[float | int] | None = None
    input: Annotated[Any, _schema(anyOf=[{"type": "string"}, {"type": "array", "items": ITEM_SCHEMA, "minItems": 1}])]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: ResponsesText | None = None
    tools: list[ResponsesFunction] | None = None
    tool_choice: ToolMode | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None  # given back
    include: list[Includable] | None = None  # all but output_text.logprobs: of items that no answer here has
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())


class TokenizeRequest(Tolerant):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Tolerant):
    model: str | None = None
    tokens: list[int]


class LoadAdapterRequest(Tolerant):
    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(Tolerant):
    lora_name: str | None = None
    lora_int_id: int | None = None


class SGLangSampling(Tolerant):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    n: int | None = None
    json_schema: JSONSchema = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    lora_path: Annotated[Any, _schema(anyOf=[{"type": "string"}, _NULL])] = None


def _inline(model: type[Tolerant]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return schema | {"properties": schema["properties"] | tolerated(model)}


_SAMPLING = _inline(SGLangSampling)
_NAME = {"type": ["string", "null"]}
_NAMES = [_NAME, {"type": "array", "items": _NAME, "minItems": 1}]


class SGLangRequest(Tolerant):
    """`text`, `input_ids`, `rid`, `lora_path` and `sampling_params` may be lists, one entry a prompt."""

    model: str | None = None
    text: Annotated[Any, _schema(anyOf=[{"type": "string"}, _TEXTS, _NULL])] = None
    input_ids: Annotated[Any, _schema(anyOf=[_TOKEN_IDS, _MANY_TOKEN_IDS, _NULL])] = None
    sampling_params: Annotated[
        Any, _schema(anyOf=[_SAMPLING, {"type": "array", "items": {"anyOf": [_SAMPLING, _NULL]}, "minItems": 1}, _NULL])
    ] = None
    lora_path: Annotated[Any, _schema(anyOf=_NAMES)] = None
    rid: Annotated[Any, _schema(anyOf=_NAMES)] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

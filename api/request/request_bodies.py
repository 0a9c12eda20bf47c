"""Declares the request bodies with the fields that this server acts on; fields.py has the other fields.

Types are strict, and null means the default. Bounds come from protocol/limits.py. Rules for several fields together
are checked by the route that reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from lorafleet.api.request.bounds import JSON_BOUNDS, AnyJSON, AtMost, Within, over_bound, range_schema
from lorafleet.api.request.chat_messages import MESSAGE_SCHEMA
from lorafleet.api.request.fields import Strict, Tolerant, tolerated
from lorafleet.api.routes.responses_input import ITEM_SCHEMA
from lorafleet.protocol import limits
from lorafleet.protocol.limits import LogprobsMode


def _schema(**schema: Any) -> WithJsonSchema:
    """Returns the schema of a field that its route checks, as pydantic's errors for unions of lists name no place."""
    return WithJsonSchema(schema)


def _printable(given: str) -> str:
    if not given.isprintable():
        raise over_bound("has characters that are not printable; ids appear in logs and headers")
    return given


_TOKEN_ID = {"type": "integer", **range_schema(limits.TOKEN_ID)}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": limits.MAX_TOKEN_IDS}
_TEXT = {"type": "string", "maxLength": limits.MAX_TEXT_CHARS}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": limits.MAX_PROMPTS}
_MANY_TOKEN_IDS = {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": limits.MAX_PROMPTS}
_ONE_OR_MANY = [_TEXT, _TEXTS, _TOKEN_IDS, _MANY_TOKEN_IDS]
_NULL = {"type": "null"}
_LABEL = {"type": "string", "maxLength": limits.MAX_LABEL_CHARS}
_SOURCE = {"type": "string", "maxLength": limits.MAX_SOURCE_BYTES}
_BIASES = {
    "type": "object",
    "maxProperties": limits.MAX_LOGIT_BIAS,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$", "maxLength": 10},
    "additionalProperties": {"type": "number", **range_schema(limits.LOGIT_BIAS)},
}

Prompts = Annotated[Any, _schema(anyOf=_ONE_OR_MANY)]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
Messages = Annotated[list[Message], AtMost(limits.MAX_MESSAGES)]
ModelName = Annotated[str, AtMost(limits.MAX_MODEL_CHARS)]
RequestId = Annotated[str, AtMost(limits.MAX_REQUEST_ID_CHARS), AfterValidator(_printable)]
Salt = Annotated[str, AtMost(limits.MAX_SALT_CHARS)]
Text = Annotated[str, AtMost(limits.MAX_TEXT_CHARS)]
Path = Annotated[str, AtMost(limits.MAX_PATH_CHARS)]
Label = Annotated[str, AtMost(limits.MAX_LABEL_CHARS)]
Source = Annotated[str, AtMost(limits.MAX_SOURCE_BYTES)]
ToolName = Annotated[str, AtMost(limits.MAX_TOOL_NAME_CHARS)]
Description = Annotated[str, AtMost(limits.MAX_DESCRIPTION_CHARS)]
Object = Annotated[dict[str, Any], AtMost(limits.MAX_JSON_VALUES), AnyJSON()]
TemplateArguments = Annotated[dict[str, Any], AtMost(limits.MAX_OBJECT_FIELDS), AnyJSON()]
Weights = Annotated[list[Annotated[float, Within(limits.MIX_WEIGHT)]], AtMost(limits.MAX_MIXED)]
Metadata = Annotated[
    dict[
        Annotated[str, AtMost(limits.MAX_METADATA_KEY_CHARS)],
        Annotated[str, AtMost(limits.MAX_METADATA_CHARS)],
    ],
    AtMost(limits.MAX_METADATA),
]

MaxTokens = Annotated[int, Within(limits.MAX_TOKENS)]
MaxThinking = Annotated[int, Within(limits.MAX_THINKING)]
N = Annotated[int, Within(limits.SAMPLING["n"])]
Temperature = Annotated[float, Within(limits.SAMPLING["temperature"])]
TopP = Annotated[float, Within(limits.SAMPLING["top_p"])]
TopK = Annotated[int, Within(limits.SAMPLING["top_k"])]
MinP = Annotated[float, Within(limits.SAMPLING["min_p"])]
Penalty = Annotated[float, Within(limits.SAMPLING["presence_penalty"])]
RepetitionPenalty = Annotated[float, Within(limits.SAMPLING["repetition_penalty"])]
Seed = Annotated[int, Within(limits.SAMPLING["seed"])]
MinTokens = Annotated[int, Within(limits.SAMPLING["min_tokens"])]
NumLogprobs = Annotated[int, Within(limits.SAMPLING["logprobs"])]
Truncation = Annotated[int, Within(limits.TRUNCATE)]
Priority = Annotated[int, Within(limits.PRIORITY)]
Version = Annotated[int, Within(limits.VERSION)]
Dimensions = Annotated[int, Within(limits.DIMENSIONS)]
LogitBias = Annotated[dict[str, float], AtMost(limits.MAX_LOGIT_BIAS), WithJsonSchema(_BIASES)]
StopText = Annotated[str, AtMost(limits.MAX_STOP_CHARS)]
Stop = StopText | Annotated[list[StopText], AtMost(limits.MAX_STOP_STRINGS)]
StopIds = Annotated[list[Annotated[int, Within(limits.TOKEN_ID)]], AtMost(limits.MAX_STOP_TOKEN_IDS)]
AllowedIds = Annotated[list[Annotated[int, Within(limits.TOKEN_ID)]], AtMost(limits.MAX_ALLOWED_TOKEN_IDS)]
BadWord = Annotated[str, AtMost(limits.MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], AtMost(limits.MAX_BAD_WORDS)]
Choices = Annotated[list[Source], AtMost(limits.MAX_CHOICES)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


_SCHEMA_OBJECT = {"type": "object", "maxProperties": limits.MAX_JSON_VALUES, **JSON_BOUNDS}
_JSON_SCHEMA = [_SCHEMA_OBJECT, {"type": "boolean"}, _SOURCE | {"description": "The same object as a JSON string."}]
_FORMAT_SCHEMA = {
    "type": "object",
    "properties": {
        "name": _LABEL,
        "description": {"type": "string", "maxLength": limits.MAX_DESCRIPTION_CHARS},
        "schema": {"anyOf": _JSON_SCHEMA},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
    "additionalProperties": False,
}
_STRUCTURE = {
    "type": "object",
    "properties": {
        "begin": _SOURCE,
        "schema": {"anyOf": [_SCHEMA_OBJECT, {"type": "boolean"}]},
        "end": _SOURCE,
    },
    "required": ["begin", "schema", "end"],
    "additionalProperties": False,
}
_PARTS = ["const_string", "any_text", "json_schema", "tag", "sequence", "or", "triggered_tags", "tags_with_separator"]
_STRUCTURAL_FORMAT = _SCHEMA_OBJECT | {"properties": {"type": {"enum": _PARTS}}, "required": ["type"]}
_TRIGGERS = {"type": "array", "items": _SOURCE, "minItems": 1, "maxItems": limits.MAX_TRIGGERS}
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
            "triggers": _TRIGGERS,
            "structures": {"type": "array", "items": _STRUCTURE, "minItems": 1, "maxItems": limits.MAX_TAGS},
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

JSONSchema = Annotated[Any, AnyJSON(), _schema(anyOf=[*_JSON_SCHEMA, _NULL])]
ResponseFormat = Annotated[Any, AnyJSON(), _schema(anyOf=[*_RESPONSE_FORMATS, _NULL])]


class StructuredOutputsRequest(Strict):
    """The `structured_outputs` entry, as in vLLM."""

    json_: JSONSchema = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Source | None = None  # JSON text in the format of response_format.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # Has no effect: there is no other backend to fall back to.


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


class FunctionDefinition(Strict):
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    parameters: Object | None = None  # A JSON schema; without one the function takes no arguments.
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class ToolGrammar(Strict):
    definition: Source = Field(min_length=1)
    syntax: Literal["lark", "regex"]


class GrammarToolFormat(Strict):
    type: Literal["grammar"]
    grammar: ToolGrammar


class TextToolFormat(Strict):
    type: Literal["text"]


class CustomDefinition(Strict):
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    # The format of the input. A grammar in Lark must not be recursive.
    format: Annotated[TextToolFormat | GrammarToolFormat, Field(discriminator="type")] | None = None


class CustomTool(Strict):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: CustomDefinition


AnyTool = Annotated[Tool | CustomTool, Field(discriminator="type")]


class NamedFunction(Strict):
    name: ToolName


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomChoice(Strict):
    type: Literal["custom"]
    custom: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedToolChoice | NamedCustomChoice, Field(discriminator="type")]], AtMost(limits.MAX_TOOLS)
    ] = Field(min_length=1)


class AllowedToolChoice(Strict):
    """A choice of those `tools` that the model is shown."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[NamedToolChoice | NamedCustomChoice | AllowedToolChoice, Field(discriminator="type")]


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
    input: Annotated[Any, _schema(anyOf=[_TEXT, _ITEMS])]
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


class TokenizeRequest(Tolerant):
    model: ModelName | None = None
    prompt: Annotated[str, AtMost(limits.MAX_TOKENIZE_CHARS)] | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], AtMost(limits.MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Tolerant):
    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, _schema(**_TOKEN_ID)]], AtMost(limits.MAX_DETOKENIZE_IDS)]


class TokenSampling(SampledRequest):
    """vLLM's SamplingParams in /inference/v1/generate."""

    n: N | None = None
    max_tokens: MaxTokens | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    detokenize: bool | None = None  # Has no effect: the answer is token ids.
    output_kind: Literal[0, 1, 2] | None = None  # Has no effect: `stream` says which parts of an answer are sent.
    return_weight_versions: None = None  # These three are beside `sampling_params`.
    weight_version: None = None
    min_weight_version: None = None


class TokensRequest(Tolerant):
    """The body of vLLM's /inference/v1/generate."""

    model: ModelName | None = None
    request_id: RequestId | None = None
    lora_weights: Weights | None = None
    token_ids: Annotated[Any, _schema(**_TOKEN_IDS)]
    sampling_params: TokenSampling
    stream: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    features: None = None  # Features of pictures and sound are not served.
    return_weight_versions: bool | None = None
    weight_version: Version | None = None
    min_weight_version: Version | None = None
    return_routed_experts: bool | None = None


class LoadAdapterRequest(Tolerant):
    lora_name: ModelName | None = None
    lora_path: Path | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(Tolerant):
    lora_name: ModelName | None = None
    lora_int_id: Seed | None = None


def _listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": limits.MAX_PROMPTS}


_NAME = {"type": "string", "maxLength": limits.MAX_MODEL_CHARS}
_RID = {"type": "string", "maxLength": limits.MAX_REQUEST_ID_CHARS}


class SGLangSampling(Tolerant):
    max_new_tokens: MaxTokens | None = None
    min_new_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    sampling_seed: Seed | None = None
    n: N | None = None
    json_schema: JSONSchema = None
    regex: Source | None = None
    ebnf: Source | None = None
    structural_tag: Source | None = None
    lora_path: Annotated[Any, _schema(anyOf=[_NAME, _NULL])] = None


def _inline(model: type[Tolerant]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return schema | {"properties": schema["properties"] | tolerated(model)}


_SAMPLING = _inline(SGLangSampling)
_NAMES = [_NAME, _NULL, _listed({"anyOf": [_NAME, _NULL]})]
_RIDS = [_RID, _NULL, _listed({"anyOf": [_RID, _NULL]})]


class SGLangRequest(Tolerant):
    """The body of SGLang's /generate.

    `text`, `input_ids`, `rid`, `lora_path` and `sampling_params` may be lists with one entry per prompt.
    """

    model: ModelName | None = None
    text: Annotated[Any, _schema(anyOf=[_TEXT, _TEXTS, _NULL])] = None
    input_ids: Annotated[Any, _schema(anyOf=[_TOKEN_IDS, _MANY_TOKEN_IDS, _NULL])] = None
    sampling_params: Annotated[Any, _schema(anyOf=[_SAMPLING, _listed({"anyOf": [_SAMPLING, _NULL]}), _NULL])] = None
    lora_path: Annotated[Any, _schema(anyOf=_NAMES)] = None
    rid: Annotated[Any, _schema(anyOf=_RIDS)] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Truncation | None = None
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_weight_versions: bool | None = None
    weight_version: Version | None = None
    min_weight_version: Version | None = None
    return_routed_experts: bool | None = None

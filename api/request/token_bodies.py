"""Declares the bodies of the routes that work with token ids: tokenizing, and vLLM's and SGLang's generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from lorafleet.api.request.body_fields import (
    MANY_TOKEN_IDS_SCHEMA,
    NULL_SCHEMA,
    TEXT_SCHEMA,
    TEXTS_SCHEMA,
    TOKEN_ID_SCHEMA,
    TOKEN_IDS_SCHEMA,
    LogitBias,
    MaxTokens,
    Messages,
    MinP,
    MinTokens,
    ModelName,
    N,
    NumLogprobs,
    Penalty,
    Priority,
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
    with_schema,
)
from lorafleet.api.request.bounds import AtMost
from lorafleet.api.request.fields import Tolerant, tolerated
from lorafleet.api.request.request_bodies import ReasoningEffort, SampledRequest
from lorafleet.api.request.structured_fields import JSONSchema
from lorafleet.api.request.tool_bodies import Tool
from lorafleet.protocol import limits


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
    tokens: Annotated[list[Annotated[int, with_schema(**TOKEN_ID_SCHEMA)]], AtMost(limits.MAX_DETOKENIZE_IDS)]


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
    token_ids: Annotated[Any, with_schema(**TOKEN_IDS_SCHEMA)]
    sampling_params: TokenSampling
    stream: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    features: None = None  # Features of pictures and sound are not served.
    return_weight_versions: bool | None = None
    weight_version: Version | None = None
    min_weight_version: Version | None = None
    return_routed_experts: bool | None = None


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
    lora_path: Annotated[Any, with_schema(anyOf=[_NAME, NULL_SCHEMA])] = None


def _inline(model: type[Tolerant]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return schema | {"properties": schema["properties"] | tolerated(model)}


_SAMPLING = _inline(SGLangSampling)
_NAMES = [_NAME, NULL_SCHEMA, _listed({"anyOf": [_NAME, NULL_SCHEMA]})]
_RIDS = [_RID, NULL_SCHEMA, _listed({"anyOf": [_RID, NULL_SCHEMA]})]


class SGLangRequest(Tolerant):
    """The body of SGLang's /generate.

    `text`, `input_ids`, `rid`, `lora_path` and `sampling_params` may be lists with one entry per prompt.
    """

    model: ModelName | None = None
    text: Annotated[Any, with_schema(anyOf=[TEXT_SCHEMA, TEXTS_SCHEMA, NULL_SCHEMA])] = None
    input_ids: Annotated[Any, with_schema(anyOf=[TOKEN_IDS_SCHEMA, MANY_TOKEN_IDS_SCHEMA, NULL_SCHEMA])] = None
    sampling_params: Annotated[
        Any, with_schema(anyOf=[_SAMPLING, _listed({"anyOf": [_SAMPLING, NULL_SCHEMA]}), NULL_SCHEMA])
    ] = None
    lora_path: Annotated[Any, with_schema(anyOf=_NAMES)] = None
    rid: Annotated[Any, with_schema(anyOf=_RIDS)] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Truncation | None = None
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_weight_versions: bool | None = None
    weight_version: Version | None = None
    min_weight_version: Version | None = None
    return_routed_experts: bool | None = None

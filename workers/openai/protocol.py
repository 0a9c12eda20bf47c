"""The request bodies, as far as this server acts on them; fields.py has the other fields.

Types are strict and null means the default. Bounds are SamplingParams' own; what spans several fields is checked by
the route that reads them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Strict):
    """What completions and chat share."""

    model: str | None = None
    lora_weights: list[float | int] | None = None  # where model mixes adapters, "a+b": of each, in the order named
    n: int | None = None
    best_of: int | None = None  # must equal n
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
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # keeps the last k; -1: as many as fit
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1)


class CompletionRequest(GenerationRequest):
    prompt: Any
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


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]


class LoadAdapterRequest(Strict):
    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(Strict):
    lora_name: str | None = None
    lora_int_id: int | None = None


class SGLangSampling(Strict):
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
    lora_path: Any = None


class SGLangRequest(Strict):
    """`text`, `input_ids`, `rid`, `lora_path` and `sampling_params` may be lists, one entry a prompt."""

    model: str | None = None
    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    lora_path: Any = None
    rid: Any = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    log_metrics: bool | None = None

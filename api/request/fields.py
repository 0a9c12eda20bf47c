"""Lists the request fields of OpenAI, vLLM and SGLang that this server does not act on.

A field that would change the answer is rejected by name, unless its value asks for nothing. A field that cannot change
the answer is accepted.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from lorafleet.api.request.bounds import fault_of_json, json_schema, over_bound
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_JSON_TEXT_CHARS, MAX_LABEL_CHARS, MAX_OBJECT_FIELDS, MAX_TEXT_CHARS


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        """Limits the number of fields, because each unknown field is an error, and a million errors take seconds."""
        if isinstance(given, dict) and len(given) > MAX_OBJECT_FIELDS:
            raise over_bound(f"has {len(given)} fields; at most {MAX_OBJECT_FIELDS} are allowed")
        return given


class Tolerant(Strict):
    """A body that clients of other servers send. It may have the fields of the tables below."""


# Fields that are accepted without effect, with the maximum number of characters of each text in them.
NO_EFFECT: dict[str, int] = {
    "user": MAX_LABEL_CHARS,
    "metadata": MAX_JSON_TEXT_CHARS,
    "safety_identifier": MAX_LABEL_CHARS,
    "prompt_cache_key": MAX_LABEL_CHARS,
    "prompt_cache_retention": MAX_LABEL_CHARS,
    "prompt_cache_options": MAX_LABEL_CHARS,
    "client_metadata": MAX_JSON_TEXT_CHARS,  # Codex names its session and turn there.
    "prediction": MAX_TEXT_CHARS,  # Speeds up an answer without changing it.
    "max_tool_calls": MAX_LABEL_CHARS,  # Counts built-in tools, which this server does not have.
    "log_metrics": MAX_LABEL_CHARS,  # SGLang's; this server counts all requests.
}

# Fields that are rejected, with the values (in addition to null) that ask for nothing and are accepted.
NO_OP_VALUES: dict[str, tuple[object, ...]] = {
    # OpenAI
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("medium",),  # OpenAI's default.
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
    "moderation": (),
    # OpenAI, /v1/responses
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "context_management": ([],),
    # vLLM
    "include_reasoning": (True,),
    "echo": (False,),  # In chat; /v1/completions supports it.
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "thinking_token_budget": (),
    "repetition_detection": (),
    # SGLang
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "input_embeds": (),
    "session_params": ({},),
    "return_hidden_states": (False,),
    "token_ids_logprob": ([],),
    "stream_interval": (),
}


def without_no_ops(body: dict[str, object], known: set[str], where: str = "") -> dict[str, object]:
    """Returns the fields of the body that remain to be validated, including all fields in `known`.

    Raises InvalidRequest for a field or value that the tables do not allow.
    """
    rest: dict[str, object] = {}
    for name, value in body.items():
        if name not in known and name in NO_OP_VALUES:
            if value is not None and not any(_same(value, allowed) for allowed in NO_OP_VALUES[name]):
                raise InvalidRequest(_refusal(name, NO_OP_VALUES[name]), where + name)
        elif name not in known and name in NO_EFFECT:
            fault = fault_of_json(value, NO_EFFECT[name])
            if fault is not None:
                raise InvalidRequest(f"`{where}{name}` {fault}.", where + name)
        else:
            rest[name] = value
    return rest


def _same(value: object, allowed: object) -> bool:
    """Compares values as in JSON: 0 is not false, 1 equals 1.0, and null entries of an object are ignored."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


# Supported fields that replace rejected ones.
INSTEAD = {"functions": "tools", "function_call": "tool_choice"}


# Fields whose rejection has a reason that clients should know.
REASONS = {
    "suffix": "no model here can fill in the middle of a text. Send the text before the gap as `prompt`.",
    "use_beam_search": (
        "the engine samples each answer by itself and does not fork answers between tokens. Set `n` and `logprobs`, "
        "and take the answer with the highest sum of logprobs."
    ),
    "length_penalty": "it ranks the answers of a beam search, which this server does not have. Leave it out.",
    "early_stopping": "it ends a beam search, which this server does not have. Leave it out.",
    "prompt_embeds": (
        "prompts are cached, counted and checked by their token ids, which vectors do not have, and a pickled tensor "
        "is not safe to read. Send text or token ids, or an adapter that trains the tokens (`modules_to_save`)."
    ),
}


def _refusal(name: str, allowed: tuple[object, ...]) -> str:
    if name in REASONS:
        return f"`{name}` is not supported: {REASONS[name]}"
    remedy = f"leave it out or set it to {allowed[0]!r}" if allowed else "leave it out"
    if name in INSTEAD:
        remedy = f"use `{INSTEAD[name]}`"
    return f"`{name}` is not supported by this server; {remedy}."


def tolerated(model: type[Tolerant]) -> dict[str, dict[str, object]]:
    """Returns the JSON schemas of the fields that a body may have in addition to those of its model."""
    known = set(model.model_fields)
    free: dict[str, dict[str, object]] = {
        name: json_schema(NO_EFFECT[name]) | {"description": "Accepted, but has no effect."}
        for name in sorted(NO_EFFECT.keys() - known)
    }
    return free | {
        name: {
            "enum": [None, *NO_OP_VALUES[name]],
            "description": "Not supported: accepted only with a value that has no effect.",
        }
        for name in sorted(set(NO_OP_VALUES) - known)
    }

"""Request fields of OpenAI, vLLM and SGLang that this server does not act on: one table.

A field either changes the answer, and then it is refused by name unless its value asks for nothing; or it cannot
change the answer, and then it is accepted.
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
        """Each unknown field is a fault of its own, and a million faults take seconds."""
        if isinstance(given, dict) and len(given) > MAX_OBJECT_FIELDS:
            raise over_bound(f"has {len(given)} fields; at most {MAX_OBJECT_FIELDS}")
        return given


class Tolerant(Strict):
    """A body that other servers' clients send: it may have the fields of the tables below."""


# With the most characters of a text in each.
NO_EFFECT: dict[str, int] = {
    "user": MAX_LABEL_CHARS,
    "metadata": MAX_JSON_TEXT_CHARS,
    "safety_identifier": MAX_LABEL_CHARS,
    "prompt_cache_key": MAX_LABEL_CHARS,
    "prompt_cache_retention": MAX_LABEL_CHARS,
    "prompt_cache_options": MAX_LABEL_CHARS,
    "prediction": MAX_TEXT_CHARS,  # makes an answer sooner, not another
    "max_tool_calls": MAX_LABEL_CHARS,  # of built-in tools, of which there are none
    "log_metrics": MAX_LABEL_CHARS,  # SGLang's: all requests are counted
    "include_reasoning": MAX_LABEL_CHARS,  # no answer is split into reasoning and content
}

# The values that ask for nothing, besides null.
NO_OP_VALUES: dict[str, tuple[object, ...]] = {
    # OpenAI
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
    "moderation": (),
    # OpenAI, of responses
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "context_management": ([],),
    # vLLM
    "echo": (False,),  # of chat
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
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
    """The body's fields that remain to be validated. `known` ones stay, whatever the table says of them."""
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
    """As JSON has it: 0 is not false, and 1 is 1.0; what is null in an object is not in it."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


# What does the same.
INSTEAD = {"functions": "tools", "function_call": "tool_choice", "reasoning_effort": "chat_template_kwargs"}


def _refusal(name: str, allowed: tuple[object, ...]) -> str:
    if name == "suffix":
        return "`suffix` is not supported: no model here fills in the middle. Give what comes before as `prompt`."
    remedy = f"leave it out or set it to {allowed[0]!r}" if allowed else "leave it out"
    if name in INSTEAD:
        remedy = f"use `{INSTEAD[name]}`"
    return f"`{name}` is not supported by this server; {remedy}."


def tolerated(model: type[Tolerant]) -> dict[str, dict[str, object]]:
    """The JSON schemas of what a body of the model may have beside its own fields."""
    known = set(model.model_fields)
    free: dict[str, dict[str, object]] = {
        name: json_schema(NO_EFFECT[name]) | {"description": "Accepted; it changes nothing."}
        for name in sorted(NO_EFFECT.keys() - known)
    }
    return free | {
        name: {
            "enum": [None, *NO_OP_VALUES[name]],
            "description": "Not supported: taken only with a value that asks for nothing.",
        }
        for name in sorted(set(NO_OP_VALUES) - known)
    }

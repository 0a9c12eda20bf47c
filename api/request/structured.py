"""Reads the format that a request sets for its answer.

The fields are OpenAI's response_format, vLLM's structured_outputs and older guided_*, and SGLang's json_schema, regex
and ebnf. A request may use only one of them. If it uses none, the adapter's own default applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lorafleet.api.request.request_bodies import GenerationRequest
from lorafleet.api.request.structural_tag import structural_tag
from lorafleet.api.request.structured_fields import StructuredOutputsRequest
from lorafleet.api.request.token_bodies import SGLangSampling
from lorafleet.api.served_model import ServedModel
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.structured_spec import StructuredOutputs

_MAKERS: Mapping[str, Callable[[Any, str], StructuredOutputs]] = {
    "guided_json": structured_spec.json_schema,
    "guided_regex": structured_spec.regex,
    "guided_choice": structured_spec.choice,
    "guided_grammar": structured_spec.grammar,
}
_SGLANG_MAKERS: Mapping[str, Callable[[Any, str], StructuredOutputs]] = {
    "json_schema": structured_spec.json_schema,
    "regex": structured_spec.regex,
    "ebnf": structured_spec.grammar,
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def read_structured(model: ServedModel, body: GenerationRequest) -> StructuredOutputs | None:
    given = {name: make for name, make in _MAKERS.items() if getattr(body, name) is not None}
    asked = [*given, *(name for name in ("structured_outputs", "response_format") if getattr(body, name) is not None)]
    if body.response_format == {"type": "text"} and len(asked) > 1:
        asked.remove("response_format")  # Some clients always send it.
    _check_one(asked)
    if not asked:
        return model.language.structured_outputs
    [name] = asked
    if name == "response_format":
        if isinstance(body.response_format, dict) and body.response_format.get("type") == "structural_tag":
            return structural_tag(body.response_format, name, model.tokenizer.special_texts)
        return structured_spec.response_format(body.response_format, name)
    if body.structured_outputs is not None:
        return _read_vllm(model, body.structured_outputs)
    return given[name](getattr(body, name), name)


def read_sglang_structured(model: ServedModel, sampling: SGLangSampling) -> StructuredOutputs | None:
    asked = [name for name in (*_SGLANG_MAKERS, "structural_tag") if getattr(sampling, name) is not None]
    _check_one(asked)
    if not asked:
        return model.language.structured_outputs
    [name] = asked
    param = f"sampling_params.{name}"
    if name == "structural_tag":
        return structural_tag(sampling.structural_tag, param, model.tokenizer.special_texts)
    return _SGLANG_MAKERS[name](getattr(sampling, name), param)


def _read_vllm(model: ServedModel, given: StructuredOutputsRequest) -> StructuredOutputs:
    values = {"json": given.json_, **{name: getattr(given, name) for name in _KINDS if name != "json"}}
    asked = [name for name in _KINDS if values[name] is not None and (name != "json_object" or values[name])]
    _check_one([f"structured_outputs.{name}" for name in asked])
    if not asked:
        raise InvalidRequest(
            f"`structured_outputs` must have one of {', '.join(_KINDS)}; otherwise leave it out.", "structured_outputs"
        )
    [name] = asked
    param, any_whitespace = f"structured_outputs.{name}", not given.disable_any_whitespace
    if name == "json":
        schema = given.json_
        if given.disable_additional_properties:
            schema = structured_spec.closed(schema)
        return structured_spec.json_schema(schema, param, any_whitespace=any_whitespace)
    if given.disable_additional_properties or (not any_whitespace and name != "json_object"):
        raise InvalidRequest(
            f"`{param}` is not a JSON schema, so `disable_additional_properties` and `disable_any_whitespace` do not "
            "apply to it; leave them out.",
            "structured_outputs",
        )
    if name == "json_object":
        return structured_spec.json_object(param, any_whitespace=any_whitespace)
    if name == "structural_tag":
        return structural_tag(given.structural_tag, param, model.tokenizer.special_texts)
    make = {"regex": structured_spec.regex, "choice": structured_spec.choice, "grammar": structured_spec.grammar}[name]
    return make(values[name], param)


def _check_one(asked: list[str]) -> None:
    if len(asked) > 1:
        raise InvalidRequest(
            f"`{asked[0]}` and `{asked[1]}` both set the format of the answer; give only one of them.", asked[1]
        )

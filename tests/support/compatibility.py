"""Writes docs/api-compatibility.md from what the server itself reads: its models and its table of other fields.

It uses openai-python's types for the fields that OpenAI's clients may send. Run it after a change:

    python tests/support/compatibility.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from lorafleet.api.request.fields import INSTEAD, NO_EFFECT, NO_OP_VALUES, Tolerant
from lorafleet.api.request.request_bodies import (
    OUTPUT_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    SGLangRequest,
    SGLangSampling,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api-compatibility.md"
OWN = {"lora_weights", "pooling"}
# The meaning of a field here, unless its name says it.
NOTES = {
    "model": "an adapter's name, or the base's",
    "lora_weights": "weights for a mix of adapters, `a+b`",
    "best_of": "must equal `n`",
    "dimensions": "keeps that many leading numbers and normalizes them to length 1 again",
    "encoding_format": "`float`, `base64`",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "include": f"`{OUTPUT_LOGPROBS}`; the other values are for items that no answer here has",
    "input": "texts or token ids; for `/v1/responses` also messages, calls and their results",
    "parallel_tool_calls": "`false`: one call at most",
    "pooling": "`last` or `mean`; default: `--pooling`",
    "prediction": "makes an answer faster, but does not change it",
    "priority": "lower values come first among one adapter's requests; with API keys, values below 0 need an admin key",
    "reasoning_effort": "use `chat_template_kwargs` for what the template reads, such as `enable_thinking`",
    "response_format": "`text`, `json_object`, `json_schema`; vLLM's `structural_tag`",
    "store": "nothing is stored",
    "log_metrics": "all requests are counted",
    "metadata": "not stored; `/v1/responses` returns it",
    "structural_tag": "as a JSON string",
    "suffix": "models here cannot fill in the middle",
    "text": "in `/v1/responses`: `format` is `text`, `json_object` or `json_schema`; in `/generate`: the prompt",
    "tool_choice": "`none`, `auto`, `required`, a function by name, or `allowed_tools`",
    "top_logprobs": "in `/v1/responses`: with `include`",
    "tools": "functions; `strict` is enforced",
    "truncate_prompt_tokens": "keeps the last k tokens; -1: as many as fit",
}
INTRODUCTION = """\
# API compatibility

This page lists, field by field, what requests of OpenAI's, vLLM's and SGLang's clients may contain. A field is one of
these:

- *honored*;
- of *no effect*, because it could not change an answer;
- *refused* with a 400 that names it, unless its value asks for nothing. The values after "but for" are accepted.

A field that is in no table is refused too: no field is accepted and then ignored. `/openapi.json` has the same for
programs, and `/docs` shows it.

`tests/support/compatibility.py` writes this page from what the server reads. A test fails if they differ.

## Tool calls

With `tool_choice: auto`, `tools` need a model whose chat template shows it tools in a known format: Qwen's and Hermes's
`<tool_call>`, Llama 3's JSON, or Mistral's `[TOOL_CALLS]`.

- The server detects the format from the template, also from an adapter's own template. `--tool-call-parser` (`hermes`,
  `llama3_json`, `mistral`, `none`) sets it instead.
- vLLM's `--enable-auto-tool-choice` is not needed. Calls are parsed whenever the format is known; otherwise the
  request is refused.
- `required`, or a function by name, works with every template that shows tools. A schema forces the call, and the
  answer ends with `finish_reason: tool_calls`.
- `allowed_tools` shows the model only those functions.
- Under `auto`, calls of functions with `strict` match their schemas ([structured output](structured-output.md#tools)).
  Other calls are parsed as the model writes them. Text that is not a call of an offered function is content.
- If a call in a stream becomes invalid after it has begun, the rest is sent as its arguments, as the model wrote it.
- With `tools` and a JSON format (`response_format`, `structured_outputs`), the answer either is calls or matches the
  format. Other formats are refused beside tools unless `tool_choice` is `none`.
"""


def sections() -> Iterator[tuple[str, type[Tolerant], set[str], str]]:
    """Yields each section's title, its model, OpenAI's fields, and the owner of the other fields."""
    yield "/v1/chat/completions", ChatRequest, _fields(chat_create_params, "CompletionCreateParamsBase"), "vLLM"
    yield "/v1/completions", CompletionRequest, _fields(completion_create_params, "CompletionCreateParamsBase"), "vLLM"
    yield "/v1/responses", ResponsesRequest, _fields(response_create_params, "ResponseCreateParamsBase"), "vLLM"
    yield "/v1/embeddings", EmbeddingRequest, _fields(embedding_create_params, "EmbeddingCreateParams"), "vLLM"
    yield "/generate", SGLangRequest, set(), "SGLang"
    yield "/generate, sampling_params", SGLangSampling, set(), "SGLang"


def _fields(module: Any, name: str) -> set[str]:
    return {*getattr(module, name).__annotations__, "stream"} - ({"stream"} if "Embedding" in name else set())


def state_of(model: type[Tolerant], name: str) -> str:
    if name in model.model_fields:
        return "honored"
    if name in NO_OP_VALUES:
        values = ", ".join(f"`{json.dumps(value)}`" for value in NO_OP_VALUES[name])
        return f"refused, but for {values}" if values else "refused"
    return "no effect" if name in NO_EFFECT else "refused"


def write() -> str:
    parts = [INTRODUCTION]
    for title, model, openais, others in sections():
        parts += [f"\n## {title}\n\n| field | whose | here | |\n|---|---|---|---|\n"]
        for name in sorted({*model.model_fields, *openais}):
            whose = "OpenAI" if name in openais else "lorafleet" if name in OWN else others
            parts.append(f"| `{name}` | {whose} | {state_of(model, name)} | {NOTES.get(name, '')} |\n")
    known = {name for _, model, openais, _ in sections() for name in {*model.model_fields, *openais}}
    parts.append(
        "\n## On every one of these routes, unless a table above has it\n\n| field | here | |\n|---|---|---|\n"
    )
    for name in sorted((NO_EFFECT.keys() | set(NO_OP_VALUES)) - known):
        remark = f"use `{INSTEAD[name]}`" if name in INSTEAD else NOTES.get(name, "")
        parts.append(f"| `{name}` | {state_of(Tolerant, name)} | {remark} |\n")
    return "".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(write())

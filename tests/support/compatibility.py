"""Writes docs/api-compatibility.md from what the server itself reads: its models and its table of other fields.

It uses the types of openai-python and of anthropic for the fields that their clients may send. Run it after a change:

    python tests/support/compatibility.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from lorafleet.api.anthropic.message_bodies import MessagesRequest
from lorafleet.api.request.fields import INSTEAD, NO_EFFECT, NO_OP_VALUES, Tolerant
from lorafleet.api.request.pooled_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from lorafleet.api.request.request_bodies import ChatRequest, CompletionRequest
from lorafleet.api.request.responses_bodies import OUTPUT_LOGPROBS, PACKED_REASONING, ResponsesRequest
from lorafleet.api.request.token_bodies import SGLangRequest, SGLangSampling

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api-compatibility.md"
OWN = {"logprobs_mode", "lora_weights", "pooling"}
# The meaning of a field here, unless its name says it.
NOTES = {
    "allowed_token_ids": "no other token is chosen; without an end-of-sequence token, answers end at `max_tokens`",
    "bad_words": "as in vLLM: with and without a space before; not with structured output or forced tool calls",
    "early_stopping": "there is no beam search",
    "length_penalty": "there is no beam search",
    "prompt_embeds": "prompts are cached and checked by token ids; send text or token ids",
    "use_beam_search": "the engine does not fork answers; use `n` and `logprobs`, and take the likeliest answer",
    "model": "an adapter's name, or the base's",
    "lora_weights": "weights for a mix of adapters, `a+b`",
    "best_of": "must equal `n`",
    "dimensions": "keeps that many leading numbers and normalizes them to length 1 again",
    "encoding_format": "`float`, `base64`",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "include": f"`{OUTPUT_LOGPROBS}`, `{PACKED_REASONING}`; the other values are for items that no answer here has",
    "include_reasoning": "leave the reasoning of an answer unread instead",
    "input": "texts or token ids; for `/v1/responses` also messages, calls and their results",
    "parallel_tool_calls": "`false`: one call at most",
    "pooling": "`last`, `mean` or `cls`; default: `--pooling`",
    "prediction": "makes an answer faster, but does not change it",
    "priority": "lower values come first among one adapter's requests; with API keys, values below 0 need an admin key",
    "chat_template_kwargs": "arguments that the template reads; others are refused",
    "reasoning": "`effort`; `summary`: `auto`, `detailed`",
    "reasoning_effort": "for templates that read it; else `none` and `medium`",
    "thinking_token_budget": "most tokens of reasoning between tags; then its end is forced",
    "response_format": "`text`, `json_object`, `json_schema`; vLLM's `structural_tag`",
    "background": "read the response later; needs `store`",
    "previous_response_id": "continues the conversation of a stored response, without its instructions",
    "store": "in `/v1/responses`: default `true`, [bounded](api.md#stored-responses); elsewhere nothing is stored",
    "logprobs_mode": "`raw_logprobs`, `processed_logprobs`; default: `--logprobs-mode`",
    "return_routed_experts": "for bases with experts; needs `--enable-return-routed-experts`",
    "log_metrics": "all requests are counted",
    "metadata": "not stored; `/v1/responses` returns it",
    "structural_tag": "as a JSON string",
    "suffix": "models here cannot fill in the middle",
    "text": "in `/v1/responses`: `format` is `text`, `json_object` or `json_schema`; in `/generate`: the prompt",
    "tool_choice": "`none`, `auto`, `required`, a tool by name, or `allowed_tools`",
    "top_logprobs": "in `/v1/responses`: with `include`",
    "tools": "functions and [custom tools](#custom-tools); `strict` and `format` are enforced",
    "documents": "texts, or objects with `text`",
    "return_documents": "default: true",
    "task": "`embed`, `classify`, `token_classify`; default: the task of the adapter's head",
    "text_1": "one text for all of `text_2`, or as many",
    "top_n": "default, and 0: all documents",
    "use_activation": "default: true; only for adapters with a classification head",
    "truncate_prompt_tokens": "keeps the last k tokens; -1: as many as fit",
}
INTRODUCTION = """\
# API compatibility

This page lists, field by field, what requests of OpenAI's, Anthropic's, vLLM's and SGLang's clients may contain. A
field is one of these:

- *honored*;
- of *no effect*, because it could not change an answer;
- *refused* with a 400 that names it, unless its value asks for nothing. The values after "but for" are accepted.

A field that is in no table is refused too: no field is accepted and then ignored. `/openapi.json` has the same for
programs, and `/docs` shows it.

`tests/support/compatibility.py` writes this page from what the server reads. A test fails if they differ.

## Tool calls

With `tool_choice: auto`, `tools` need a model whose chat template shows it tools in a known format:

| format | models | arguments |
|---|---|---|
| `deepseek_v3`, `deepseek_v31` | DeepSeek V3, R1; DeepSeek V3.1 | JSON |
| `gemma4` | Gemma 4 | Gemma's objects |
| `glm45` | GLM 4.5 to 4.7 | between tags |
| `granite` | Granite 3 | JSON |
| `harmony` | gpt-oss | JSON |
| `hermes` | Qwen2.5, Qwen3, Hermes, Granite 4, Ernie 4.5 | JSON |
| `hunyuan` | Hunyuan A13B | JSON |
| `kimi_k2` | Kimi K2 | JSON |
| `lfm2` | LFM2 | Python's literals |
| `llama3_json` | Llama 3, Llama 4 with a JSON template | JSON |
| `llama4_pythonic` | Llama 4 | Python's literals |
| `minimax_m2` | MiniMax M2 | between tags |
| `mistral` | Mistral, Ministral, Devstral | JSON |
| `nemotron_json` | Nemotron Nano 2 | JSON |
| `olmo3` | OLMo 3 | Python's literals |
| `phi4_mini_json` | Phi-4-mini | JSON |
| `qwen3_coder` | Qwen3-Coder, Qwen3.5, Nemotron 3 | between tags |
| `seed_oss` | Seed-OSS | between tags |

- The server detects the format from the template, also from an adapter's own. `--tool-call-parser NAME` sets it
  instead, and so does `"tool_call_parser": NAME` in an adapter's `lorafleet.json`. `none`: calls are not parsed.
- Arguments of functions always reach the client as JSON. Between tags, the function's schema decides whether a value is
  a text.
- vLLM's `--enable-auto-tool-choice` is not needed. Calls are parsed whenever the format is known; otherwise the
  request is refused.
- `required`, or a tool by name, works with every template that shows tools. A schema forces the call, and the
  answer ends with `finish_reason: tool_calls`.
- `allowed_tools` shows the model only those tools.
- Under `auto`, calls of functions with `strict` match their schemas ([structured output](structured-output.md#tools)).
  Other calls are parsed as the model writes them. Text that is not a call of an offered function is content.
- If a call in a stream becomes invalid after it has begun, the rest is sent as its arguments, as the model wrote it.
- With `tools` and a JSON format (`response_format`, `structured_outputs`), the answer either is calls or matches the
  format. Other formats are refused beside tools unless `tool_choice` is `none`.
- For gpt-oss, strict functions and JSON formats constrain whole answers: texts in them cannot contain `<|`.

## Custom tools

A tool of type `custom` has text as its input. The model is shown a function with one string, `input`, since open models
know no other tools, and writes its call in its own format. The client gets the text: `custom.input` in chats, items
`custom_tool_call` and events `response.custom_tool_call_input.delta` in `/v1/responses`. Calls and their outputs go
back as OpenAI's clients send them.

- `format` of type `grammar` with the syntax `regex` forces the input, under each `tool_choice`.
- The syntax `lark` is refused: a short grammar in Lark can stand for an expression of any length. Write the expression
  itself, or leave `format` out.
- The expressions of all tools of a request may have 1 MiB together.
- Each expression must be valid by itself, and has no comments (flag `x`).
- Formats of calls with arguments between tags (GLM, Qwen3-Coder, MiniMax, Seed-OSS) and Gemma 4 cannot force a pattern
  under `auto`. Such a request is refused; set `tool_choice` to `required` or name the tool.
- In streams of chats, each chunk of a call has `custom` in place of `function`.

## Reasoning

Reasoning is separated from the content if the chat template shows its format: Harmony's channels (gpt-oss), or tags
at the beginning of an answer:

| format | models |
|---|---|
| `think` | `<think>`: Qwen3, Qwen3.5, DeepSeek, GLM 4.5, Nemotron, MiniMax M2, SmolLM3, OLMo 3 and others |
| `think_response`, `think_answer` | Granite 3.3; Hunyuan A13B: `<think>`, then the text in `<response>` or `<answer>` |
| `gemma4` | `<\\|channel>thought` |
| `mistral` | `[THINK]`: Magistral |
| `granite` | Granite 3.2 |
| `seed_oss` | `<seed:think>` |
| `command_a` | `<\\|START_THINKING\\|>` |

- Messages and deltas have it in `reasoning_content` and, with the same text, in `reasoning`. Its tokens are counted as
  others are.
- `/v1/responses` has it as an item of type `reasoning`, before the message. Its text is in `content`, or in `summary`
  if the request has `reasoning.summary`. Such items are accepted as input. `reasoning_tokens` counts its tokens.
- `include: ["reasoning.encrypted_content"]` adds the text in base64, for clients that return items of reasoning without
  their text. It is not encrypted. What another server has encrypted is refused.
- `reasoning_effort` is an argument of the template. For a template that reads only `enable_thinking` or `thinking`,
  `none` switches reasoning off. `medium` is OpenAI's default and asks for nothing. Other values are refused.
- `chat_template_kwargs` may have only arguments that the template reads. `enable_thinking: false` is always accepted.
- `thinking_token_budget` bounds the tokens of the reasoning. When they are spent, the closing tag is forced. The tag
  must be one token of the model. With Harmony the field is refused.
- An answer that reached `max_tokens` while the model was reasoning has no content.
- In Harmony's format, the channel `analysis` is reasoning, `final` and `commentary` are content, and `commentary` to a
  function is a call.
- `--reasoning-parser NAME` overrides what the template shows about tags, and so does `"reasoning_parser": NAME` in an
  adapter's `lorafleet.json`; `none`: reasoning is not separated. Harmony goes by `--tool-call-parser`. If an adapter's
  own template shows no tags, the base's count.
- A JSON format, a strict function and a required call apply after the reasoning, unless the prompt has closed it.
  Other formats (`regex`, `choice`, `grammar`, structural tags) constrain an answer from its first token.
- Messages of the assistant may have `reasoning_content` or `reasoning`. Templates get it under these names and as
  `thinking`, and most of them use only that of the latest calls.

## Forms of messages

Clients send back what another library or server wrote. `/v1/chat/completions` accepts these forms, which cannot change
the prompt:

- `content` as an empty list, which is no text. In messages of the assistant, of tools and of functions it may be `null`
  or missing.
- Parts of the types `input_text` and `output_text`, which mean what `text` means. A template that takes one text gets
  the parts with a line break between them.
- In parts: `cache_control`, `prompt_cache_breakpoint`, `annotations`, `logprobs` and `id`, without effect.
- In messages: `id`, `status`, `cache_control`, `parsed` and `provider_specific_fields`, without effect;
  `function_call`, `refusal`, `audio` and `annotations` if they are empty.

## Lists of tokens, beam search, embeddings as prompts, batches

- `allowed_token_ids` and `bad_words` mean what they mean to vLLM. A bad word is banned as the tokens of its text, with
  and without a space before it. vLLM bans the form with a space only if both have as many tokens, so that it allows
  ` fox` where this is one token and `fox` is three; lorafleet bans it. The last of a word's tokens has no chance where
  the answer has the others before it; the prompt does not count. Other tokenizations of the same text are not found.
- A request is refused if these lists, with `min_tokens`, could leave no token to choose. For the same reason they are
  refused beside a format (`response_format`, `structured_outputs`) or a forced call.
- Beam search (`use_beam_search`, `length_penalty`, `early_stopping`) is refused, since the engine does not fork answers
  between tokens. For the likeliest of several answers, set `n` and `logprobs`, and compare the sums of their logprobs.
- `prompt_embeds` is refused. The prefix cache, quotas and checks work on token ids, which vectors do not have, and the
  pickled tensors that vLLM accepts are not safe to read.
- `/v1/files` and `/v1/batches` work as in OpenAI with `--batch-store` ([tools.md](tools.md#batches-on-a-server)). The
  only purpose of an upload is `batch`, and the only completion window is `24h`. All files expire, after 30 days at
  most. [`lorafleet run-batch`](tools.md#batches) takes the same input lines and writes the same output lines.
"""


ANTHROPIC = """
## /v1/messages

`/v1/messages/count_tokens` has those of these fields that determine the prompt. Blocks are text, thinking, calls and
results; pictures, documents, search results and redacted thinking are refused by their place. Headers
(`anthropic-version`, `anthropic-beta`) have no effect.

| field | here | |
|---|---|---|
"""
ANTHROPIC_NO_EFFECT = {"cache_control", "metadata", "service_tier"}
ANTHROPIC_REFUSED = {
    "container": "refused",
    "context_management": "refused, but for `clear_thinking_20251015` with `keep: all`",
    "diagnostics": "refused",
    "inference_geo": "refused",
    "mcp_servers": "refused, but for `[]`",
    "speed": 'refused, but for `"standard"`',
}
ANTHROPIC_NOTES = {
    "cache_control": "also of blocks and tools: every prefix is cached",
    "chat_template_kwargs": "as in vLLM",
    "lora_weights": NOTES["lora_weights"],
    "max_tokens": "lowered to the room in the context",
    "messages": "a last message of the assistant is continued; a result with `is_error` begins with `Error: `",
    "metadata": "only `user_id`",
    "model": NOTES["model"],
    "output_config": "`format` is enforced. `effort` is `reasoning_effort` of templates that read it, where `xhigh` "
    "and `max` are `high`; with other templates only `high` is accepted, which is the default",
    "priority": NOTES["priority"],
    "service_tier": "there is only the standard tier",
    "stop_sequences": "at most 16",
    "temperature": "the client's own range is 0 to 1; here up to 100",
    "thinking": "sets `enable_thinking` and `thinking` of the template. `disabled` also leaves out the blocks of "
    "models that reason in any case. `display: omitted` empties them. `budget_tokens` is `thinking_token_budget` for "
    "models whose reasoning ends with one token; with others, only `max_tokens` bounds it. `signature` is a constant, "
    "and is not checked",
    "tool_choice": "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`",
    "tools": "those of the client; `strict` is enforced. Anthropic's own tools are refused",
}


def sections() -> Iterator[tuple[str, type[Tolerant], set[str], str]]:
    """Yields each section's title, its model, OpenAI's fields, and the owner of the other fields."""
    yield "/v1/chat/completions", ChatRequest, _fields(chat_create_params, "CompletionCreateParamsBase"), "vLLM"
    yield "/v1/completions", CompletionRequest, _fields(completion_create_params, "CompletionCreateParamsBase"), "vLLM"
    yield "/v1/responses", ResponsesRequest, _fields(response_create_params, "ResponseCreateParamsBase"), "vLLM"
    yield "/v1/embeddings", EmbeddingRequest, _fields(embedding_create_params, "EmbeddingCreateParams"), "vLLM"
    yield "/pooling", PoolingRequest, set(), "vLLM"
    yield "/classify", ClassifyRequest, set(), "vLLM"
    yield "/score, /v1/score", ScoreRequest, set(), "vLLM"
    yield "/rerank, /v1/rerank, /v2/rerank", RerankRequest, set(), "vLLM"
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


def _anthropic_state(name: str) -> str:
    if name not in MessagesRequest.model_fields or name in ANTHROPIC_REFUSED:
        return ANTHROPIC_REFUSED.get(name, "refused")
    return "no effect" if name in ANTHROPIC_NO_EFFECT else "honored"


def write() -> str:
    parts = [INTRODUCTION]
    for title, model, openais, others in sections():
        parts += [f"\n## {title}\n\n| field | whose | here | |\n|---|---|---|---|\n"]
        for name in sorted({*model.model_fields, *openais}):
            whose = "OpenAI" if name in openais else "lorafleet" if name in OWN else others
            parts.append(f"| `{name}` | {whose} | {state_of(model, name)} | {NOTES.get(name, '')} |\n")
    parts.append(ANTHROPIC)
    for name in sorted({*MessagesRequest.model_fields, *_fields(message_create_params, "MessageCreateParamsBase")}):
        parts.append(f"| `{name}` | {_anthropic_state(name)} | {ANTHROPIC_NOTES.get(name, '')} |\n")
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

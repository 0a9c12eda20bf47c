"""Requests that are made to cost much are answered, or refused, without much memory and without a pause of the loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp

import request_costs
import tool_templates
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer

MAX_BYTES = 64 << 20  # Beyond the body.
MAX_PAUSE = 10  # In units of the known work, of which one takes about 5 ms.
ASK = [{"role": "user", "content": "a"}]


def tag(num_triggers: int, num_chars: int) -> dict[str, Any]:
    """Before triggers had names in the grammar, each was repeated in the rules of all others."""
    triggers = [f"{i:04d}{'x' * (num_chars - 4)}" for i in range(num_triggers)]
    structures = [{"begin": trigger, "schema": {}, "end": "e"} for trigger in triggers]
    return {"type": "structural_tag", "triggers": triggers, "structures": structures}


def custom(number: int, definition: str, syntax: str) -> dict[str, Any]:
    grammar = {"definition": definition, "syntax": syntax}
    return {"type": "custom", "custom": {"name": f"t{number}", "format": {"type": "grammar", "grammar": grammar}}}


def function(number: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters, "strict": True}}


def doubling() -> str:
    rules = "".join(f"r{i}: r{i - 1} r{i - 1}\n" for i in range(1, 20))
    return f'start: r19\n{rules}r0: "x"\n'


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "llama", "prompt": "a", "max_tokens": 1} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "llama", "messages": ASK, "max_tokens": 1} | fields


def thinking(num_messages: int, num_chars: int) -> dict[str, Any]:
    block = {"type": "thinking", "thinking": "y" * num_chars, "signature": ""}
    turns = [{"role": "assistant", "content": [block]}] * num_messages
    return {"model": "llama", "max_tokens": 1, "messages": [*ASK, *turns, *ASK]}


def many_blocks() -> dict[str, Any]:
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "y"}] * 4}] * 4000
    return {"model": "llama", "max_tokens": 1, "messages": [*ASK, *turns, *ASK]}


def reasoning_items() -> dict[str, Any]:
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "y" * 3800}]}
    return {"model": "llama", "max_output_tokens": 1, "input": [*ASK, *[item] * 4000]}


SCHEMA = {"enum": [f"{i:01000d}" for i in range(900)]}  # 0.9 MB


def wrong_blocks() -> dict[str, Any]:
    """Each block is wrong in several ways, since its type may be one of several."""
    block = {"type": "tool_result", "tool_use_id": 1, "content": [{"type": "x"}] * 10}
    return {"model": "llama", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}] * 4000}


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a tag whose triggers are as long as they may be": (
        "/v1/completions",
        lambda: completion(response_format=tag(64, 4096)),
    ),
    "a tag of 15 MB": ("/v1/completions", lambda: completion(response_format=tag(64, 120_000))),
    "a tag as text": ("/v1/completions", lambda: completion(structured_outputs={"structural_tag": "[" * (1 << 20)})),
    "custom tools whose grammars double": (
        "/v1/chat/completions",
        lambda: chat(tools=[custom(i, doubling(), "lark") for i in range(512)]),
    ),
    "custom tools with long expressions": (
        "/v1/chat/completions",
        lambda: chat(tools=[custom(i, "(a)" * 349_000, "regex") for i in range(14)]),
    ),
    "functions of 15 MB that are strict": (
        "/v1/chat/completions",
        lambda: chat(tools=[function(i, {"type": "object", "description": "x" * 29_000}) for i in range(512)]),
    ),
    "a call of one of them that is required": (
        "/v1/responses",
        lambda: {
            "model": "llama",
            "input": "a",
            "tool_choice": "required",
            "tools": [{"type": "function", "name": f"f{i}", "parameters": {"title": "x" * 29_000}} for i in range(512)],
        },
    ),
    "a schema for each of many prompts": (
        "/generate",
        lambda: {"text": ["a"] * 2048, "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 1}},
    ),
    "an expression for each of many prompts": (
        "/v1/completions",
        lambda: completion(prompt=["a"] * 2048, guided_regex="a" * 1_000_000),
    ),
    "choices of 15 MB": (
        "/v1/completions",
        lambda: completion(guided_choice=["x" * 1500 + str(i) for i in range(9999)]),
    ),
    "reasoning in many messages": ("/v1/messages", lambda: thinking(4000, 3800)),
    "reasoning to be counted": (
        "/v1/messages/count_tokens",
        lambda: {name: value for name, value in thinking(4000, 100).items() if name != "max_tokens"},
    ),
    "many blocks": ("/v1/messages", many_blocks),
    "many wrong blocks": ("/v1/messages", wrong_blocks),
    "long documents that are returned": (
        "/rerank",
        lambda: {"model": "llama", "query": "a", "documents": ['"' * 400_000] * 19, "truncate_prompt_tokens": 9},
    ),
    "reasoning in many items": ("/v1/responses", reasoning_items),
    "arguments of template": (
        "/v1/chat/completions",
        lambda: chat(chat_template_kwargs={"a": ["x" * 15] * 65_000}),
    ),
    "metadata": ("/v1/completions", lambda: completion(metadata={str(i): [] for i in range(60_000)})),
    "tools that each event repeats": (
        "/v1/responses",
        lambda: {
            "model": "llama",
            "input": "a",
            "stream": True,
            "tool_choice": "none",
            "tools": [
                {"type": "function", "name": f"f{i}", "parameters": {f"k{j}": {"title": "é"} for j in range(100)}}
                for i in range(500)
            ],
        },
    ),
    "tools that are not shown": (
        "/v1/responses",
        lambda: {
            "model": "llama",
            "input": "a",
            "tool_choice": "none",
            "tools": [{"type": "function", "name": f"f{i}", "description": "x" * 29_000} for i in range(512)],
        },
    ),
}


@pytest.fixture
def app(front: AppState, tokenizer: Tokenizer, engine: Any) -> Iterator[ASGIApp]:
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=4096, kv_cache_tokens=8192)
    config = replace(front.config, chat_template=tool_templates.HERMES)
    state = make_state(config, tokenizer, engine, front.models.catalog)
    yield build_api(lambda: state)
    state.close()


@pytest.mark.parametrize("name", BODIES)
async def test_a_request_that_is_made_to_cost_much_does_not(app: ASGIApp, name: str) -> None:
    path, make = BODIES[name]
    body = json.dumps(make()).encode()
    assert len(body) <= 16 << 20
    answer, costs = await request_costs.memory_of(app, path, body)
    assert answer.status_code in (200, 400, 413), answer.text
    of_client = 2 * len(answer.content)  # It is in this process too, in pieces and then as a whole.
    assert costs.num_bytes - of_client <= MAX_BYTES, answer.text
    unit_s = request_costs.known_work_s()
    answer, costs = await request_costs.pause_of(app, path, body)
    assert costs.pause_s <= MAX_PAUSE * unit_s, answer.text

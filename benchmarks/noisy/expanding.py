"""Attacks with fields that the server expands beyond the size of the body: grammars, tags, reasoning and prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from noisy.hostile import Attack, Call, Hostile, post
from noisy.pushing import good_files, pushed

MIB = 1 << 20
# A template that shows tools, so that their definitions reach the checks behind it.
SHOWS_TOOLS = (
    b"{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools><tool_call>{% endif %}"
    b"{% for m in messages %}{{ m.content }}{% endfor %}"
)


def _doubling(levels: int) -> str:
    """Returns a grammar in Lark whose expression has 2 ** levels characters."""
    rules = [f"r{i}: r{i - 1} r{i - 1}" for i in range(1, levels + 1)]
    return "\n".join([f"start: r{levels}", *rules, 'r0: "x"'])


def _custom(name: str, syntax: str, definition: str) -> dict[str, object]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


async def custom_tools(hostile: Hostile) -> None:
    """Sends hundreds of custom tools whose grammars in Lark double a text with each rule, and long expressions."""
    files = good_files(hostile) | {
        "chat_template.jinja": SHOWS_TOOLS,
        "lorafleet.json": b'{"tool_call_parser":"hermes"}',
    }
    models = [await pushed(hostile, files), hostile.model]
    many = [_custom(f"t{i}", "lark", _doubling(5)) for i in range(400)]
    deep = [_custom(f"t{i}", "lark", _doubling(19)) for i in range(100)]
    long = [_custom(f"t{i}", "regex", "(a)" * 300_000) for i in range(15)]
    calls = [hostile.chat(model=model, tools=tools) for tools in (many, deep, long) for model in models]
    await hostile.flood(*calls, width=12)


async def long_triggers(hostile: Hostile) -> None:
    """Sends structural tags with 64 triggers of up to 120,000 characters, each of which must exclude all others."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            size = (100, 3_000, 30_000, 120_000)[number % 4]
            triggers = [f"{i:04d}{number}".ljust(size, "x") for i in range(64)]
            structures = [{"begin": trigger, "schema": {}, "end": "e"} for trigger in triggers]
            given = {"type": "structural_tag", "triggers": triggers, "structures": structures}
            yield hostile.completion(response_format=given, max_tokens=2)

    await hostile.flood_with(calls(), width=6)


async def truncated_prompts(hostile: Hostile) -> None:
    """Sends fifteen prompts of a megabyte in each request, of which a few tokens are used."""
    prompts = ["What colour is a lime? " * (MIB // 23)] * 15
    few = {"truncate_prompt_tokens": 8, "max_tokens": 2}
    embedded = {"model": hostile.model, "input": prompts, "truncate_prompt_tokens": 8}
    await hostile.flood(hostile.completion(prompt=prompts, **few), post("/v1/embeddings", embedded), width=6)


async def reasoning_blocks(hostile: Hostile) -> None:
    """Sends 4,094 blocks of reasoning of 3,800 characters to /v1/messages, and as items to /v1/responses."""
    block = {"type": "thinking", "thinking": "y" * 3800, "signature": ""}
    messages = [
        {"role": "user", "content": "a"},
        *[{"role": "assistant", "content": [block]}] * 4094,
        {"role": "user", "content": "b"},
    ]
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "y" * 3800}]}
    body = {"model": hostile.model, "messages": messages}
    calls = [post("/v1/messages", body | {"max_tokens": 2}), post("/v1/messages/count_tokens", body)]
    calls += [
        post("/v1/responses", {"model": hostile.model, "input": [{"role": "user", "content": "a"}, *[item] * 4000]})
    ]
    await hostile.flood(*calls, width=4)


async def every_structured_format(hostile: Hostile) -> None:
    """Sends ever new outputs in every structured format, each of nearly the largest size."""

    def formats(number: int) -> list[dict[str, object]]:
        properties = {f"p{number}_{i}": {"type": "integer"} for i in range(3_000)}
        schema = {"type": "object", "properties": properties}
        named = {"name": "s", "schema": schema, "strict": True}
        tag = {"begin": f"<t{number}>", "schema": schema, "end": "</t>"}
        return [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"response_format": {"type": "structural_tag", "triggers": ["<t"], "structures": [tag]}},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"regex": f"(a|b{number}){{1,900}}"}},
            {"structured_outputs": {"choice": [f"{number} {i}" for i in range(20_000)]}},
            {
                "structured_outputs": {
                    "grammar": f'start: a+\na: "x{number}" | ' + " | ".join(f'"{i}"' for i in range(9_000))
                }
            },
        ]

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            for fields in formats(number):
                yield hostile.completion(**fields, n=4, temperature=1.0, max_tokens=40)

    await hostile.flood_with(calls(), width=16)


ATTACKS: tuple[Attack, ...] = (
    *(custom_tools, long_triggers, truncated_prompts, reasoning_blocks, every_structured_format),
)

"""Attacks on the processes that compile grammars and render chat templates beside the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from noisy.hostile import Attack, Call, Hostile
from noisy.pushing import Files, good_files, pushed


async def slow_grammars(hostile: Hostile) -> None:
    """Sends ever new grammars of ten thousand rules."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            rules = "\n".join(f'r{i}: "a{number}" r{i + 1}? | r{(i * 7) % 10_000}' for i in range(10_000))
            yield hostile.completion(structured_outputs={"grammar": f'start: r0\n{rules}\nr10000: "z"'})

    await hostile.flood_with(calls(), width=16)


async def ambiguous_grammars(hostile: Hostile) -> None:
    """Sends grammars in which every text can be parsed in many ways, and decodes with them token by token."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            lark = f'start: e\ne: e e | "a" | "b{number}" | e "a" e'
            yield hostile.completion(structured_outputs={"grammar": lark}, n=8, max_tokens=200, temperature=1.0)

    await hostile.flood_with(calls())


async def slow_regexes(hostile: Hostile) -> None:
    """Sends ever new regular expressions whose automata are huge."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            for pattern in (f"(a|b)*a(a|b){{{200 + number}}}", f"(.{{0,{500 + number}}}x){{40}}", "(a?){5000}" * 20):
                yield hostile.completion(structured_outputs={"regex": pattern}, max_tokens=100)

    await hostile.flood_with(calls(), width=16)


async def slow_schemas(hostile: Hostile) -> None:
    """Sends ever new JSON schemas with thousands of properties, long enumerations, and bounds of a hundred thousand."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            wide = {"type": "object", "properties": {f"p{number}_{i}": {"type": "string"} for i in range(5_000)}}
            names = {"enum": [f"v{number}_{i}" for i in range(20_000)]}
            item = {"type": "array", "items": {"type": "string", "maxLength": 1000}, "maxItems": 1000}
            bounded = {"type": "array", "items": item, "minItems": number % 100, "maxItems": 100_000 + number}
            for schema in (wide, names, bounded):
                yield hostile.completion(structured_outputs={"json": schema}, max_tokens=50)

    await hostile.flood_with(calls(), width=16)


async def recursive_schemas(hostile: Hostile) -> None:
    """Sends many JSON schemas of references to one another and alternatives of alternatives."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            some = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * k + number) % 300}"} for k in range(1, 12)]}
                    for i in range(300)}  # fmt: skip
            yield hostile.completion(structured_outputs={"json": {"$defs": some, "$ref": "#/$defs/d0"}})

    await hostile.flood_with(calls(), width=16)


async def choices(hostile: Hostile) -> None:
    """Sends ever new lists of 10,000 and of 100,000 choices."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            for size in (10_000, 10_000, 100_000):
                yield hostile.completion(structured_outputs={"choice": [f"{number} choice {i}" for i in range(size)]})

    await hostile.flood_with(calls())


async def structural_tags(hostile: Hostile) -> None:
    """Sends structural tags with thousands of structures and dozens of triggers."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            triggers = [f"<t{i}" for i in range(60)]
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            tags = [{"begin": f"<t{i % 60}-{i}>", "schema": schema, "end": "</t>"} for i in range(2_000)]
            given = {"type": "structural_tag", "triggers": triggers, "structures": tags}
            yield hostile.completion(response_format=given, max_tokens=50)

    await hostile.flood_with(calls())


TEMPLATES = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "grows": "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "recurses": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "is slow": "{% for i in range(90000) %}{{ messages[0]['content']|upper|lower|title }}{% endfor %}",
    "writes much": "{% for i in range(90000) %}" + "0123456789" * 4 + "{% endfor %}",
}


async def templates(hostile: Hostile) -> None:
    """Has adapters whose chat templates loop, grow, recurse or write megabytes, in chats and for tokenization."""
    files = {kind: good_files(hostile) | {"chat_template.jinja": text.encode()} for kind, text in TEMPLATES.items()}
    await _chat_with(hostile, list(files.values()), width=16)


async def ever_new_templates(hostile: Hostile) -> None:
    """Has sixteen adapters whose templates take nearly a second each, which is below the time limit."""
    slow = "{% for i in range(COUNT) %}{{ messages|tojson|length }}{% endfor %}"
    templates = [slow.replace("COUNT", str(20_000 + i)).encode() for i in range(16)]
    files = [good_files(hostile) | {"chat_template.jinja": template} for template in templates]
    await _chat_with(hostile, files, width=32)


async def _chat_with(hostile: Hostile, adapters: Sequence[Files], width: int) -> None:
    names = [await pushed(hostile, files) for files in adapters]
    await hostile.flood(*(hostile.chat(model=name) for name in names), width=width)


ATTACKS: tuple[Attack, ...] = (
    *(slow_grammars, ambiguous_grammars, slow_regexes, slow_schemas, recursive_schemas, choices, structural_tags),
    *(templates, ever_new_templates),
)

"""Grammar and parser of each format together: random answers that the grammar allows, and calls that try to get past
it, read by the parser that serving uses."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from lorafleet.api.request.function_tools import AnswerReader, read_answer
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.api.tool_calls import harmony
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.formatted import FormattedParser, may_open_like
from lorafleet.api.tool_calls.known import FORMATS
from lorafleet.api.tool_calls.parser import Calls, ToolCallParser
from lorafleet.api.tool_calls.section_formats import SECTIONS
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.workers.structured import grammar_compiler, grammar_settings
from tiny_models import tokenizer as tiny_tokenizer

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", 'é"}']}},
}
ARGUMENTS: dict[str, dict[str, Any]] = {"set": STRICT, "free": {"type": "object"}, "set_all": {"type": "object"}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"nickname": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 23]}},
    "required": ["nickname", "age"],
    "additionalProperties": False,
}
FORMAT = structured_spec.json_schema(PERSON, "response_format.json_schema.schema")
SPECIAL = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", *harmony.MARKERS),
    *sorted({letters for section, _ in SECTIONS.values() for letters in (section.start, section.end)} - {""}),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
SPECIAL = tuple(dict.fromkeys(SPECIAL))
# Tokens that stand across the borders of grammars' parts.
ACROSS = (
    *(
        '>{"',
        '{"name',
        '": "',
        '": {',
        '"}}',
        '"}</',
        "}}\n</tool_call>",
        "]}}]",
        "<tool",
        "_call>",
        "[TOOL_",
        "CALLS]f",
    ),
    *("|python_tag|>{", '}}; {"name": "', '{"nick', "x<tool", "]}", "{}}"),
)


class Vocabulary:
    """special: the markers are special tokens; else ones that text may be written with."""

    def __init__(self, files: TokenizerFiles, *, special: bool) -> None:
        made = copy.deepcopy(tiny_tokenizer())
        made.add_tokens(list(ACROSS))
        made.add_tokens(list(SPECIAL), special_tokens=special)
        made.add_special_tokens({"eos_token": "<|stop|>"})
        self.tokenizer = Tokenizer(made)
        self.end = self.tokenizer.eos_token_id or 0
        self.markers = set(made.convert_tokens_to_ids(list(harmony.MARKERS)))
        file = files.of(self.tokenizer)
        settings = grammar_settings.Settings(file.path, file.vocab_size, [self.end], 1, 0, 1, 1, 1, 1, 1, 1, 1, False)
        self.library = grammar_compiler.read_tokenizer(settings)
        ids = range(self.tokenizer.vocab_size)
        bytes_of = {self.tokenizer.token_bytes(i): i for i in ids if i != self.end}
        self.closing = [bytes_of[text.encode()] for text in ('"', "}", "]", ":", ",", ";", '"}}', "]}")]
        self.by_letters = bytes_of
        self.first: dict[int, list[tuple[bytes, int]]] = {}  # The tokens by their first byte.
        for letters, token in bytes_of.items():
            if letters:
                self.first.setdefault(letters[0], []).append((letters, token))
        # The only tokens that can write these texts.
        self.whole = [text.encode() for text in SPECIAL] if special else []

    def matcher(self, given: structured_spec.StructuredOutputs) -> Any:
        text = grammar_compiler.grammar_of((given.kind, given.source, given.any_whitespace))
        matcher = grammar_compiler.matcher_of(self.library, text)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()

    def spell(self, text: str, rng: random.Random, *, marks: bool = False) -> list[int]:
        """Returns the text in tokens of any length. If `marks`, markers that are special tokens are written as such."""
        written, place, ids = text.encode(), 0, list[int]()
        marked = {i: mark for mark in self.whole if marks for i in range(len(written)) if written.startswith(mark, i)}
        while place < len(written):
            if place in marked:
                letters = marked[place]
                token = self.by_letters[letters]
            else:
                end = min((i for i in marked if i > place), default=len(written))
                fitting = self.first[written[place]]
                letters, token = rng.choice(
                    [one for one in fitting if place + len(one[0]) <= end and written.startswith(one[0], place)]
                )
            ids.append(token)
            place += len(letters)
        return ids

    def write(self, matcher: Any, marker: str, rng: random.Random, most: int = 160) -> str | None:
        """A random answer; None where it does not end in time."""
        matcher, ids = matcher.deep_copy(), list[int]()
        while len(ids) < most:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = set(map(int, np.flatnonzero(bits)))
            assert allowed, self.text(ids)
            marked = [i for i in [self.by_letters[marker.encode()]] if i in allowed]
            closing = [i for i in self.closing if i in allowed]
            if self.end in allowed and (len(allowed) == 1 or rng.random() < 0.15):
                return self.text(ids)
            liked = marked if marked and rng.random() < 0.4 else closing if rng.random() < 0.6 else []
            token = rng.choice(liked or sorted(allowed - {self.end}))
            ids.append(token)
            assert matcher.consume_token(token)
        return None

    def answers(self, matcher: Any, marker: str, rng: random.Random, num_answers: int) -> Iterator[str]:
        """Yields so many random answers, or fewer if many do not end in time."""
        for _ in range(4 * num_answers):
            text = self.write(matcher, marker, rng)
            if text is not None:
                yield text
                num_answers -= 1
            if not num_answers:
                return


@pytest.fixture(scope="module", params=[True, False], ids=["special", "spelled"])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    files = TokenizerFiles()
    yield Vocabulary(files, special=request.param)
    files.close()


def constraint(vocabulary: Vocabulary, name: str, **more: Any) -> structured_spec.StructuredOutputs:
    offer = Offer(ARGUMENTS, vocabulary.tokenizer.special_texts, **more)
    if FORMATS[name].has_channels and not vocabulary.tokenizer.special_ids >= vocabulary.markers:
        with pytest.raises(InvalidRequest, match="no special token"):
            FORMATS[name].grammar(offer)
        pytest.skip("the format needs special tokens, and says so")
    return offer.constraint(FORMATS[name].grammar(offer))


def read(name: str, text: str, *, eager: bool, formatted: bool = False) -> tuple[str | None, list[tuple[str, str]]]:
    """Content and calls, whole or a character at a time."""
    known = FORMATS[name]
    parser: ToolCallParser = known.make(Calls(ARGUMENTS, eager=eager, schemas=ARGUMENTS))
    if formatted and not known.has_channels:
        parser = FormattedParser(known.openings, parser)
    reader = AnswerReader(parser, parallel=True)
    parsed = read_answer(_Cut(reader) if eager else reader, text)  # type: ignore[arg-type]  # like it
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls]


class _Cut:
    """A reader that gets its text in characters."""

    def __init__(self, reader: AnswerReader) -> None:
        self.finish = reader.finish
        self._reader = reader

    def push(self, text: str) -> list[Any]:
        return [event for char in text for event in self._reader.push(char)]


def check(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.Draft202012Validator(ARGUMENTS[name]).validate(json.loads(arguments))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_call_in_a_random_answer_matches(vocabulary: Vocabulary, name: str, parallel: bool) -> None:
    rng = random.Random(5)
    matcher = vocabulary.matcher(constraint(vocabulary, name, parallel=parallel))
    counts: list[int] = []
    strict = 0
    for text in vocabulary.answers(matcher, FORMATS[name].marker, rng, 3 if name in SECTIONS else 30):
        content, calls = read(name, text, eager=False)
        assert read(name, text, eager=True) == (content, calls), text
        check(calls)
        counts.append(len(calls))
        strict += any(called == "set" for called, _ in calls)
    if name in SECTIONS:  # They have few answers here, since the calls that try to get past a grammar follow below.
        assert counts
        return
    assert strict
    assert 0 in counts
    assert max(counts) > 1 if parallel and name != "harmony" else max(counts) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_random_answer_beside_a_format_is_calls_or_matches_it(vocabulary: Vocabulary, name: str) -> None:
    rng = random.Random(6)
    matcher = vocabulary.matcher(constraint(vocabulary, name, text=FORMAT))
    num_called = num_formatted = 0
    for text in vocabulary.answers(matcher, FORMATS[name].marker, rng, 3 if name in SECTIONS else 24):
        content, calls = read(name, text, eager=False, formatted=True)
        assert read(name, text, eager=True, formatted=True) == (content, calls), text
        check(calls)
        if calls:
            assert content is None
            num_called += 1
        else:
            jsonschema.Draft202012Validator(PERSON).validate(json.loads(content or ""))
            num_formatted += 1
    assert name in SECTIONS or (num_called and num_formatted)


GOOD = '{"unit": "C", "days": []}'
BAD = '{"unit": "K", "days": []}'


def _pairs(arguments: str) -> list[tuple[str, str]]:
    """Names and values; texts have no quotes."""
    values = json.loads(arguments)
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]


def _lines(arguments: str) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _pairs(arguments))


def _python(arguments: str) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())


# Each is read as a call of set.
ESCAPES: dict[str, list[Callable[[str], str]]] = {
    "hermes": [
        lambda a: f'<tool_call>{{"name": "set", "arguments": {a}}}</tool_call>',
        lambda a: f'<tool_call>\n{{"arguments": {a}, "name": "set"}}\n</tool_call>',
        lambda a: f'<tool_call>{{"n\\u0061me": "set", "arguments": {a}}}</tool_call>',
        lambda a: f'<tool_call>{{"name": "s\\u0065t", "arguments": {a}}}</tool_call>',
        lambda a: f'<tool_call>{{"type": "x", "name": "set", "parameters": {a}}}</tool_call>',
        lambda a: f'Hm <tool_call>{{"name": "free", "arguments": {{}}}}<tool_call>{{"name":"set","arguments":{a}}}',
        lambda a: f'<tool_call><tool_call>{{"name": "set", "arguments": {a}}}</tool_call>',
        lambda a: f'<tool_call>{{}}<tool_call>{{"name": "set", "arguments": {a}}}</tool_call>',
    ],
    "llama3_json": [
        lambda a: f'{{"name": "set", "parameters": {a}}}',
        lambda a: f' \n{{"parameters": {a}, "name": "set"}}',
        lambda a: f'{{"name": "set", "arguments": {a}}}',
        lambda a: f'{{"name": "free", "parameters": {{}}}} {{"name": "set", "parameters": {a}}}',
        lambda a: f'{{"name": "free", "parameters": {{}}}} ; ;\n{{"name": "set", "parameters": {a}}}',
        lambda a: f'<|python_tag|>{{"name": "set", "parameters": {a}}}',
        lambda a: f'{{"name": "free", "parameters": {{}}}}. <|python_tag|>{{"name": "set", "parameters": {a}}}',
        lambda a: f'<|python_tag|>f()<|python_tag|> {{"name": "set", "parameters": {a}}}',
    ],
    "mistral": [
        lambda a: f'[TOOL_CALLS] [{{"name": "set", "arguments": {a}}}]',
        lambda a: f'[TOOL_CALLS][{{"name": "free", "arguments": {{}}}}, {{"arguments": {a}, "name": "set"}}]',
        lambda a: f"Hm[TOOL_CALLS]set{a}",
        lambda a: f"[TOOL_CALLS] set [ARGS] {a}",
        lambda a: f"[TOOL_CALLS]free{{}}[TOOL_CALLS]set{a}",
        lambda a: f"[TOOL_CALLS]f(1)[TOOL_CALLS]set{a}",
    ],
    "harmony": [
        lambda a: f"<|channel|>commentary to=functions.set <|constrain|>json<|message|>{a}",
        lambda a: f"<|channel|>commentary to=functions.set<|message|>{a}",
        lambda a: f" to=functions.set<|channel|>commentary json<|message|>{a}",
        lambda a: f"<|channel|>analysis to=functions.set<|message|>{a}",
        lambda a: f"<|channel|>analysis<|message|>x<|channel|>commentary to=functions.set<|message|>{a}",
        lambda a: f"<|channel|>final<|message|>x<|end|><|start|>assistant to=functions.set<|message|>{a}",
    ],
    "qwen3_coder": [
        lambda a: f"<tool_call>\n<function=set>\n{_lines(a)}</function>\n</tool_call>",
        lambda a: f"Hm <tool_call><function=set>{_lines(a)}</function></tool_call>",
        lambda a: f"<tool_call><function=free></function><function=set>\n{_lines(a)}</function></tool_call>",
        lambda a: f"<tool_call><function=free><parameter=x>\n</function>\n</parameter></function></tool_call>"
        f"<tool_call><tool_call><function=set>{_lines(a)}</function></tool_call>",
    ],
    "seed_oss": [lambda a: f"<seed:tool_call>\n<function=set>\n{_lines(a)}</function>\n</seed:tool_call>"],
    "minimax_m2": [
        lambda a: '<minimax:tool_call>\n<invoke name="set">'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _pairs(a))
        + "</invoke></minimax:tool_call>",
    ],
    "glm45": [
        lambda a: "<tool_call>set\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _pairs(a))
        + "</tool_call>",
    ],
    "gemma4": [
        lambda a: "<|tool_call>call:set{"
        + ",".join(f'{key}:<|"|>{value}<|"|>' if key == "unit" else f"{key}:{value}" for key, value in _pairs(a))
        + "}<tool_call|>",
        lambda a: f"Hm<|tool_call>call:free{{}}<tool_call|><|tool_call>call:set{a}<tool_call|>",
    ],
    "llama4_pythonic": [
        lambda a: f"[set({_python(a)})]",
        lambda a: f" [free(), set({_python(a)})]",
        lambda a: f"Hm <|python_start|>[set({_python(a)})]<|python_end|>",
    ],
    "lfm2": [lambda a: f"<|tool_call_start|>[set({_python(a)})]<|tool_call_end|>"],
    "olmo3": [lambda a: f"<function_calls>set({_python(a)})\n</function_calls>"],
    "deepseek_v3": [
        lambda a: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>set\n```json\n{a}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek_v31": [
        lambda a: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>set<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: E501
        lambda a: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>free<｜tool▁sep｜>{{}}\n<｜tool▁call▁begin｜>"
        f"set<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "kimi_k2": [
        lambda a: f"<|tool_calls_section_begin|><|tool_call_begin|>functions.set:0<|tool_call_argument_begin|>{a}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        lambda a: f"<|tool_calls_section_begin|><|tool_call_begin|>set:0<|tool_call_argument_begin|>{a}",
    ],
    **{
        name: [
            lambda a, section=SECTIONS[name][0]: f'{section.start}[{{"name": "set", "arguments": {a}}}]{section.end}',
            lambda a, section=SECTIONS[name][0]: f'{section.start} [{{"arguments": {a}, "name": "set"}}]',
        ]
        for name in ("granite", "phi4_mini_json", "nemotron_json", "hunyuan")
    },
}  # fmt: skip
BESIDE_CALLS = {
    "harmony": ("<|channel|>analysis<|message|>Well, { <tool<|end|><|start|>assistant<|channel|>final<|message|>x",)
}


@pytest.mark.parametrize("name", FORMATS)
def test_no_wording_gets_a_call_past_the_grammar(vocabulary: Vocabulary, name: str) -> None:
    rng = random.Random(7)
    matcher = vocabulary.matcher(constraint(vocabulary, name))
    for escape in ESCAPES[name]:
        _, calls = read(name, escape(BAD), eager=False)
        assert ("set", BAD) in calls, escape(BAD)
        for _ in range(10):
            ids = vocabulary.spell(escape(BAD), rng)
            assert matcher.deep_copy().try_consume_tokens(ids) < len(ids), escape(BAD)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_matches_may_be_written_in_any_tokens(vocabulary: Vocabulary, name: str) -> None:
    rng = random.Random(8)
    matcher = vocabulary.matcher(constraint(vocabulary, name))
    for text in (*BESIDE_CALLS.get(name, ("", "Well, { <tool")), ESCAPES[name][0](GOOD)):
        for _ in range(5):
            ids = vocabulary.spell(text, rng, marks=True)
            taken = matcher.deep_copy()
            assert taken.try_consume_tokens(ids) == len(ids), (text, taken.get_error())
            assert taken.is_accepting()


@pytest.mark.parametrize(
    ("text", "more"),
    [
        *(
            ({"minLength": "1})/ | /x"}, {}),
            ({"minLength": -1}, {}),
            ({"maxLength": 2.5}, {}),
            ({"maxLength": None}, {}),
        ),
        *(({"minLength": 2, "maxLength": 1}, {}), ({"maxLength": 1 << 40}, {}), ({"minLength": True}, {})),
        *(({"enum": "abc"}, {}), ({"enum": []}, {}), ({}, {"required": 5}), ({}, {"required": "a"})),
    ],
)
def test_a_schema_with_wrong_values_is_refused_before_it_is_written_as_a_grammar(
    text: dict[str, Any], more: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **text}}, **more}
    with pytest.raises(InvalidRequest, match="strict function 'f'"):
        FORMATS["qwen3_coder"].grammar(Offer({"f": schema}, {}))


OPEN = {"type": "object", "properties": {"a": {}}}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "may"),
    [
        (structured_spec.json_object("x"), True),
        (structured_spec.json_schema(True, "x"), True),
        (structured_spec.json_schema(OPEN, "x"), True),
        (structured_spec.json_schema(CLOSED | {"properties": {"name": {}}}, "x"), True),
        (structured_spec.json_schema(CLOSED | {"patternProperties": {"^n": {}}}, "x"), True),
        (structured_spec.json_schema({"type": ["object", "null"]}, "x"), True),
        (structured_spec.json_schema(CLOSED, "x"), False),
        (structured_spec.json_schema({"type": "array"}, "x"), False),
    ],
)
def test_only_json_that_cannot_begin_like_a_call_stands_beside_calls_without_a_marker(
    text: structured_spec.StructuredOutputs, may: bool
) -> None:
    assert may_open_like(text, FORMATS["llama3_json"].openings) == may
    assert not may_open_like(text, FORMATS["hermes"].openings)

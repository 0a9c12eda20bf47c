from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lorafleet.api.request.structural_tag import structural_tag
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.workers.structured import grammar_compiler, grammar_settings

DAY = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"], "additionalProperties": False}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "triggers": ["<f=", "[["],
    "structures": [
        {"begin": "<f=day>", "schema": DAY, "end": "</f>"},
        {"begin": "<f=days>", "schema": {"type": "array", "items": DAY, "minItems": 1}, "end": "</f>"},
        {"begin": "[[", "schema": True, "end": ""},
    ],
}


ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
X: dict[str, Any] = {"type": "tag", "begin": "<x>", "content": NUMBER, "end": "</x>"}
Y: dict[str, Any] = {"type": "tag", "begin": "<y>", "content": {"type": "const_string", "value": "why"}, "end": ""}
THINK = {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [X, Y]}
SEPARATED = {"type": "tags_with_separator", "tags": [X, Y], "separator": ", "}


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> Any:
    files = TokenizerFiles()
    file = files.of(tokenizer)
    settings = grammar_settings.Settings(
        file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 1, 0, 1, 1, 1, 1, 1, 1, 1, False
    )
    yield grammar_compiler.read_tokenizer(settings)
    files.close()


def takes(library: Any, given: object, ids: Sequence[int], special: dict[str, int] | None = None) -> bool:
    made = structural_tag(given, "x", special or {})
    text = grammar_compiler.grammar_of((made.kind, made.source, made.any_whitespace))
    matcher = grammar_compiler.matcher_of(library, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", True),
        ("What a day é, a < b, [1]", True),
        ('On <f=day>{"day": 3}</f> and <f=days>[{"day":4}]</f>, [[null', True),
        ('[[{"a": "<f="}<f=day>{"day": 3}</f>', True),
        ("<f=day>", False),
        ('<f=day>{"day": "3"}</f>', False),
        ('<f=day>[{"day": 3}]</f>', False),
        ('<f=days>{"day": 3}</f>', False),
        ('<f=night>{"day": 3}</f>', False),
        ('<f=day>{"day": 3} and so on', False),
        ("a [[b", False),
    ],
)
def test_text_is_free_up_to_a_trigger(library: Any, tokenizer: Tokenizer, text: str, taken: bool) -> None:
    ids = tokenizer.encode(text)
    assert takes(library, TAG, ids) == taken
    assert takes(library, json.dumps(TAG), ids) == taken


NESTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (ANY, ["", "x\n<y"], []),
    (X, ["<x>1</x>"], ["", "<x>3</x>", "<x>1</x>.", "a<x>1</x>"]),
    ({"type": "or", "elements": [X, Y, NUMBER]}, ["<x>1</x>", "<y>why", "2"], ["<y>2", "<x>1</x>2"]),
    (
        {"type": "sequence", "elements": [THINK, {"type": "or", "elements": [X, ANY]}]},
        ["<think></think>", "<think>a < b</thin</think><x>1</x>", "<think></think></think>"],
        ["", "a", "<think>", "<think>a"],
    ),
    (TRIGGERED, ["", "a", "a <x>1</x><y>why, <y>why"], ["<", "<x>why</x>"]),
    (TRIGGERED | {"at_least_one": True}, ["<y>why", "<x>1</x> a <y>why"], ["", "a", "a <y>why"]),
    (TRIGGERED | {"stop_after_first": True}, ["", "a", "a <y>why"], ["a <y>why.", "<y>why<y>why"]),
    (
        TRIGGERED | {"at_least_one": True, "stop_after_first": True},
        ["<y>why", "<x>2</x>"],
        ["", "a<y>why", "<y>why<y>why"],
    ),
    (SEPARATED, ["", "<y>why", "<x>1</x>, <y>why, <x>2</x>"], ["a", "<y>why,", "<y>why<y>why"]),
    (SEPARATED | {"at_least_one": True}, ["<y>why, <y>why"], [""]),
    (SEPARATED | {"stop_after_first": True}, ["", "<y>why"], ["<y>why, <y>why"]),
]


@pytest.mark.parametrize(("part", "taken", "refused"), NESTED)
def test_nested_parts_follow_each_other(
    library: Any, tokenizer: Tokenizer, part: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": part}
    assert [text for text in taken if not takes(library, tag, tokenizer.encode(text))] == []
    assert [text for text in refused if takes(library, tag, tokenizer.encode(text))] == []


def test_a_trigger_that_is_a_special_token_is_that_token(library: Any, tokenizer: Tokenizer) -> None:
    *_, (letters, token) = tokenizer.special_texts.items()
    tag = {"triggers": [letters], "structures": [{"begin": letters + "f", "schema": DAY, "end": ""}]}
    ids = tokenizer.encode('f{"day": 3}')
    spelled = [i for letter in letters for i in tokenizer.encode(letter)]
    assert takes(library, tag, [*tokenizer.encode("a"), token, *ids], tokenizer.special_texts)
    assert not takes(library, tag, [token, *tokenizer.encode("x")], tokenizer.special_texts)
    assert not takes(library, tag, [*spelled, *ids], tokenizer.special_texts)
    for mixed in (letters + "f", "f" + letters):
        with pytest.raises(InvalidRequest, match="has both"):
            takes(
                library,
                tag | {"triggers": [mixed], "structures": [tag["structures"][0] | {"begin": mixed}]},
                [],
                tokenizer.special_texts,
            )
    within = {"format": {"type": "const_string", "value": f"a{letters}b"}}
    assert takes(library, within, [*tokenizer.encode("a"), token, *tokenizer.encode("b")], tokenizer.special_texts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "`format`, or both `triggers`"),
        ("[" * 9999, "`format`, or both `triggers`"),
        ([], "`format`, or both `triggers`"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "max_tokens"),
        ({"format": {"type": "token", "token": 3}}, "token"),
        ({"format": {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "x"}]}}, "must come last"),
        ({"format": {"type": "tag", "begin": "x", "content": dict(TRIGGERED), "end": "y"}}, "must come last"),
        ({"format": {"type": "or", "elements": []}}, "length >= 1"),
        (TAG | {"type": "tag"}, "`format`, or both `triggers`"),
        (TAG | {"structures": [{"begin": "<f=", "end": ""}]}, "`schema`"),
        (TAG | {"structures": []}, "length >= 1"),
        (TAG | {"triggers": [""]}, "length >= 1"),
        (TAG | {"triggers": [f"<{i}>" for i in range(65)]}, "length <= 64"),
        (TAG | {"triggers": ["<f=", "[[", "["]}, "contains the trigger"),
        (TAG | {"triggers": ["<f=", "[[", "!"]}, "no tag begins with"),
        (TAG | {"triggers": ["<f="]}, "does not begin with any of the `triggers`"),
    ],
)
def test_what_is_no_structural_tag_is_refused_by_name(wrong: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        structural_tag(wrong, "structured_outputs.structural_tag", {})
    assert refused.value.param == "structured_outputs.structural_tag"

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.structured import grammar_program
from lorafleet.workers.structured.structural_tag import structural_tag
from lorafleet.workers.tokenizer import Tokenizer
from lorafleet.workers.tokenizer_files import TokenizerFiles

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


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> Any:
    files = TokenizerFiles()
    file = files.of(tokenizer)
    settings = grammar_program.Settings(file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 1, 0, 1, 1, 1, 1, 1)
    yield grammar_program.read_tokenizer(settings)
    files.close()


def takes(library: Any, given: object, ids: Sequence[int], special: dict[str, int] | None = None) -> bool:
    made = structural_tag(given, "x", special or {})
    text = grammar_program.grammar_of((made.kind, made.source, made.any_whitespace))
    matcher = grammar_program.matcher_of(library, text)
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


def test_a_trigger_that_is_a_special_token_is_that_token(library: Any, tokenizer: Tokenizer) -> None:
    *_, (letters, token) = tokenizer.special_texts.items()
    tag = {"triggers": [letters], "structures": [{"begin": letters + "f", "schema": DAY, "end": ""}]}
    ids = tokenizer.encode('f{"day": 3}')
    spelled = [i for letter in letters for i in tokenizer.encode(letter)]
    assert takes(library, tag, [*tokenizer.encode("a"), token, *ids], tokenizer.special_texts)
    assert not takes(library, tag, [token, *tokenizer.encode("x")], tokenizer.special_texts)
    assert not takes(library, tag, [*spelled, *ids], tokenizer.special_texts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "must have `triggers`"),
        ({"format": {"type": "any_text"}}, "must have `triggers`"),
        (TAG | {"type": "tag"}, "must have `triggers`"),
        (TAG | {"structures": [{"begin": "<f=", "end": ""}]}, "must have `triggers`"),
        (TAG | {"structures": []}, "at least one structure"),
        (TAG | {"triggers": [""]}, "not empty"),
        (TAG | {"triggers": [f"<{i}>" for i in range(65)]}, "1 to 64"),
        (TAG | {"triggers": ["<f=", "[[", "["]}, "contains"),
        (TAG | {"triggers": ["<f=", "[[", "!"]}, "which no structure begins with"),
        (TAG | {"triggers": ["<f="]}, "begins with none of the `triggers`"),
    ],
)
def test_what_is_no_structural_tag_is_refused_by_name(wrong: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        structural_tag(wrong, "structured_outputs.structural_tag", {})
    assert refused.value.param == "structured_outputs.structural_tag"

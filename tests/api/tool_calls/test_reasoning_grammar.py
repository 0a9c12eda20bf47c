"""Formats after reasoning and budgets of reasoning, by the library that serves them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.known import FORMATS
from lorafleet.api.tool_calls.reasoning_grammar import with_reasoning
from lorafleet.api.tool_calls.thinking import TAGS
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.workers.structured import grammar_compiler, grammar_settings
from tiny_models import tokenizer as tiny_tokenizer

THINK, GEMMA, GRANITE = TAGS["think"], TAGS["gemma4"], TAGS["granite"]
NUMBER = structured_spec.json_schema({"enum": [1, 23]}, "response_format.json_schema.schema")


class Vocabulary:
    def __init__(self, files: TokenizerFiles, *, special: bool) -> None:
        made = copy.deepcopy(tiny_tokenizer())
        made.add_tokens(["<think>", "</think>", "<|channel>", "<channel|>"], special_tokens=special)
        made.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
        made.add_special_tokens({"eos_token": "<|stop|>"})
        self.tokenizer = Tokenizer(made)
        self.end = self.tokenizer.eos_token_id or 0
        file = files.of(self.tokenizer)
        settings = grammar_settings.Settings(file.path, file.vocab_size, [self.end], 1, 0, 1, 1, 1, 1, 1, 1, 1, False)
        self.library = grammar_compiler.read_tokenizer(settings)

    def matcher(self, *args: Any) -> Any:
        answer, tags, beginning, budget = args
        given = with_reasoning(answer, tags, beginning, self.tokenizer, budget)
        assert given is not None
        text = grammar_compiler.grammar_of((given.kind, given.source, given.any_whitespace))
        matcher = grammar_compiler.matcher_of(self.library, text)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def takes(self, matcher: Any, text: str) -> bool:
        """Whether the text is a whole answer."""
        matcher, ids = matcher.deep_copy(), self.ids(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def allowed(self, matcher: Any, text: str) -> list[int]:
        matcher = matcher.deep_copy()
        ids = self.ids(text)
        assert matcher.try_consume_tokens(ids) == len(ids)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits)]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    files = TokenizerFiles()
    yield Vocabulary(files, special=request.param)
    files.close()


def test_the_closing_tag_is_forced_when_the_budget_is_spent(vocabulary: Vocabulary) -> None:
    closing = vocabulary.ids("</think>")
    for tags, beginning, before, answer in (
        (THINK, "open", "", None),
        (THINK, "undecided", "\n<think>", None),
        (THINK, "open", "", NUMBER),
        (GEMMA, "undecided", "<|channel>thought", None),
    ):
        ends = closing if tags is THINK else vocabulary.ids("<channel|>")
        matcher = vocabulary.matcher(answer, tags, beginning, 3)
        assert len(vocabulary.allowed(matcher, before + "?!")) > 100
        assert vocabulary.allowed(matcher, before + "?!?") == ends
        rest = "23" if answer else "Hi <tool_call> <think>"
        assert vocabulary.takes(matcher, f"{before}?{tags.closing}\n\n{rest}")
        assert vocabulary.takes(matcher, f"{before}?!?{tags.closing}{rest}")
        assert not vocabulary.takes(matcher, f"{before}?!??{tags.closing}{rest}")
        none = vocabulary.matcher(answer, tags, beginning, 0)
        assert vocabulary.allowed(none, before) == ends


def test_an_answer_without_reasoning_is_not_bounded(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(None, THINK, "undecided", 2)
    assert vocabulary.takes(matcher, "Hi, how are you?")
    assert vocabulary.takes(matcher, "<tool_call>{}</tool_call>")
    assert not vocabulary.takes(matcher, "<think>Hi, how are you?")


def test_a_format_applies_after_the_closing_tag(vocabulary: Vocabulary) -> None:
    for beginning, answers in (
        ("open", ["Hm 1</think>\n23", "</think>1"]),
        ("undecided", ["<think>Hm</think> 23", "1", "\n<think></think>1"]),
    ):
        matcher = vocabulary.matcher(NUMBER, THINK, beginning, None)
        assert [vocabulary.takes(matcher, text) for text in answers] == [True] * len(answers)
        for wrong in ("Hm 1</think>24", "Hm</think>", "2"):
            assert not vocabulary.takes(matcher, wrong)
    spelled = vocabulary.matcher(NUMBER, GRANITE, "undecided", None)
    assert vocabulary.takes(spelled, "Here is my thought process: 1 Here is my response: 23")
    assert vocabulary.takes(spelled, "23")
    assert not vocabulary.takes(spelled, "Here is my thought process: 1 Here is my response: 2")


def test_strict_calls_come_after_the_reasoning(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    offer = Offer({"f": schema}, vocabulary.tokenizer.special_texts)
    answer = offer.constraint(FORMATS["hermes"].grammar(offer))
    matcher = vocabulary.matcher(answer, THINK, "open", None)
    call = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>'
    assert vocabulary.takes(matcher, "Hm {</think>\n" + call % 1)
    assert vocabulary.takes(matcher, "Hm</think>Hi")
    assert not vocabulary.takes(matcher, "Hm</think>" + call % 2)


def test_a_closing_tag_of_several_tokens_has_no_budget(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="several tokens"):
        vocabulary.matcher(None, GRANITE, "open", 5)


def test_a_prompt_that_has_closed_the_reasoning_leaves_the_format_as_it_is(vocabulary: Vocabulary) -> None:
    assert with_reasoning(NUMBER, THINK, "closed", vocabulary.tokenizer, 5) is NUMBER

"""The lines that each model is trained on, and those that are held out."""

from __future__ import annotations

import pytest

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.drafts.draft_split import TrafficSplit, split_traffic
from lorafleet.tools.drafts.draft_traffic import TrafficLine


def split(name: str, lines: list[TrafficLine], held_out: list[TrafficLine] | None = None, *, only: bool = True):
    return split_traffic(name, lines, held_out, base_names=("base", "llama"), is_only_model=only)


def asked(*prompts: str, model: str | None = None) -> list[TrafficLine]:
    return [TrafficLine("here", model, prompt) for prompt in prompts]


def prompts(found: TrafficSplit) -> tuple[list[str], list[str]]:
    return [line.prompt for line in found.train], [line.prompt for line in found.held_out]


def test_a_model_has_its_own_lines_and_those_of_any_model():
    lines = [*asked("any", "all"), *asked("sql", model="sql"), *asked("llama", model="llama"), *asked("x", model="x")]
    held_out = asked("held")
    assert prompts(split("sql", lines, held_out)) == (["any", "all", "sql"], ["held"])
    assert prompts(split("base", lines, held_out)) == (["any", "all", "llama"], ["held"])


def test_every_tenth_prompt_is_held_out_with_all_its_repetitions():
    train, held_out = prompts(split("base", asked(*"abcdefghijk", "a", "b")))
    assert held_out == ["a", "k"]
    assert train == [*"bcdefghij", "b"]


def test_a_prompt_that_is_held_out_is_not_trained_on():
    assert prompts(split("base", asked("a", "b", "a"), asked("a", "a"))) == (["b"], ["a"])


def test_an_answer_needs_its_model_if_several_are_trained():
    lines = [*asked("a"), TrafficLine("file, line 2", None, "b", answer="c")]
    assert len(split("base", lines).train) == 1
    with pytest.raises(InvalidRequest, match="file, line 2 has an answer and no model"):
        split("base", lines, only=False)


def test_a_model_without_lines_is_refused_with_the_models_that_have_some():
    with pytest.raises(InvalidRequest, match=r"sql has 0 prompts to train on.*'chat', 'llama'"):
        split("sql", [*asked("a", model="llama"), *asked("b", model="chat")])
    with pytest.raises(InvalidRequest, match="1 prompts to train on and 0"):
        split("base", asked("a"))

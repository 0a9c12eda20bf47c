"""Drafts from past answers of the same adapter."""

from __future__ import annotations

from typing import Any

import pytest

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation import past_answers
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.speculation.past_answers import PastAnswers, owner_of

PAST = [20, 21, 22, 23, 24, 25]


def sequence(answer: list[int], digest: str = "", **fields: Any) -> Sequence:
    lora = LoRARequest(digest, 1, "path", digest) if digest else None
    return Sequence("r", [1, *answer], 1, SamplingParams(), seed=0, max_tokens=100, lora=lora, **fields)


def ended(drafter: NgramDrafter, one: Sequence) -> None:
    drafter.propose([Wanted(one, 1, 1)])
    drafter.release(one)


def draft(drafter: NgramDrafter, one: Sequence, most: int = 4) -> list[int]:
    [found] = drafter.propose([Wanted(one, len(one.tokens), most)])
    return found


def test_a_draft_may_come_from_the_answer_before_and_ends_with_it() -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram"))
    ended(drafter, sequence(PAST))
    ended(drafter, sequence([30, 31, UNKNOWN]))
    assert draft(drafter, sequence([20, 21])) == [22, 23, 24, 25]
    assert draft(drafter, sequence([23, 24])) == [25]
    assert draft(drafter, sequence([24, 25])) == []
    assert draft(drafter, sequence([30, 31])) == []


def test_the_longer_match_counts_and_of_equal_ones_the_sequence_s_own() -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram"))
    ended(drafter, sequence(PAST))
    assert draft(drafter, sequence([20, 21, 40, 20, 21]), 1) == [40]
    assert draft(drafter, sequence([9, 21, 22, 41, 20, 21, 22]), 1) == [23]


@pytest.mark.parametrize(
    "fields",
    [{"digest": "other"}, {"tenant": "other"}, {"cache_salt": "other"}, {"base": BaseIdentity("other")}],
    ids=str,
)
def test_nothing_is_drafted_from_answers_of_other_weights_tenants_or_salts(fields: dict[str, Any]) -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram"))
    mine = {"digest": "d", "tenant": "t", "cache_salt": "s", "base": BaseIdentity("b")}
    ended(drafter, sequence(PAST, **mine))
    assert draft(drafter, sequence([20, 21], **mine)) == [22, 23, 24, 25]
    assert draft(drafter, sequence([20, 21], **mine | fields)) == []


def test_the_answers_that_are_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_answers, "TEXT_TOKENS", 64)
    monkeypatch.setattr(past_answers, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(past_answers, "MOST_OWNERS", 3)
    past = PastAnswers(2, 4)
    one = sequence([*range(30, 60)])
    for _ in range(40):
        past.add(one)
        texts = past.of(owner_of(one))
        assert len(texts) <= 2
        assert all(len(text.tokens) <= 64 for text in texts)
    assert list(texts[0].tokens)[:11] == [*range(50, 60), UNKNOWN], "an answer's last tokens"
    for name in "abc":
        past.add(sequence([1, 2], digest=name))
    assert not past.of(owner_of(one))
    assert past.of(owner_of(sequence([], digest="a")))
    past.add(sequence([], digest="empty"))
    assert not past.of(owner_of(sequence([], digest="empty")))


def test_a_sequence_that_was_never_looked_at_leaves_nothing() -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram"))
    drafter.release(sequence(PAST))
    assert draft(drafter, sequence([20, 21])) == []

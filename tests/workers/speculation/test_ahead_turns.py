"""When drafts are made behind a step in flight, and when they wait for its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
import torch

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.draft_verification import DraftVerification, VerifiedRows
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.speculation.ahead_drafts import AheadDrafts
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.drafter import DeviceDrafts, Wanted
from lorafleet.workers.speculation.speculation import Speculation
from tests.workers.speculation.drafting import AlwaysAhead, DraftsPay
from tests.workers.speculation.test_speculation import Forcing, Sevens, decode, plain

DRAFTS = [UNKNOWN] * 4


class OnDevice(Sevens):
    """Drafts behind any step for all sequences but those that it has not caught up with."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[Wanted] = []
        self.not_caught_up: set[Sequence] = set()
        self.lack_room: set[Sequence] = set()

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        return entry.sequence in step.rows and entry.sequence not in self.not_caught_up

    def may_catch_up(self, sequence: Sequence) -> bool:
        return sequence not in self.lack_room

    def propose_behind(self, wanted: Many[Wanted], step: DraftVerification) -> DeviceDrafts:  # noqa: ARG002  it is the same for all
        self.behind = list(wanted)
        rows = {entry.sequence: row for row, entry in enumerate(wanted)}
        counts = {entry.sequence: entry.most for entry in wanted}
        return DeviceDrafts(torch.full((len(wanted), 8), 7), rows, counts)


def made() -> tuple[Speculation, OnDevice]:
    drafter = OnDevice()
    budget = StepBudget(StepLimits(64))
    speculation = Speculation(
        drafter, budget, 4, 64, DraftsPay(), is_certain=True, ahead=AheadDrafts(drafter, AlwaysAhead())
    )
    plain(speculation, 3)
    return speculation, drafter


def in_flight(*sequences: Sequence) -> tuple[list[Chunk], DraftVerification]:
    """Puts a step with four drafts of each sequence in flight."""
    chunks = [Chunk(one, 5, drafts=DRAFTS) for one in sequences]
    for one in sequences:
        one.num_computed, one.num_unverified = len(one.tokens), 4
        one.tokens.append(UNKNOWN)
    rows = {one: VerifiedRows(i, 5 * i, 4) for i, one in enumerate(sequences)}
    return chunks, DraftVerification(1, rows, torch.zeros(64, dtype=torch.int64), torch.zeros(len(sequences)))


def test_drafts_follow_those_in_flight_and_the_host_knows_none_of_them() -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other", params=SamplingParams(logprobs=1))
    chunks, verification = in_flight(one, other)
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([one, other], 2, is_behind=True) == {one: DRAFTS, other: DRAFTS}
    assert [(entry.num_known, entry.most) for entry in drafter.behind] == [(4, 4), (4, 4)]
    assert speculation.unknown is not None and not drafter.wanted
    assert not speculation.choose([], 2)
    assert speculation.unknown is None


def test_what_has_left_the_step_since_gets_no_drafts() -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other")
    chunks, verification = in_flight(one, other)
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([other], 2, is_behind=True) == {other: DRAFTS}
    assert [entry.sequence for entry in drafter.behind] == [other]


def test_an_answer_gets_no_more_drafts_than_it_may_have_tokens_left() -> None:
    speculation, _ = made()
    one, last = decode(max_tokens=9), decode("last", max_tokens=6)
    chunks, verification = in_flight(one, last)
    assert one.num_remaining == 3 and last.num_remaining == 0
    assert not speculation.needs_tokens(chunks, [one, last], 2, verification)
    assert speculation.choose([one], 2, is_behind=True) == {one: DRAFTS[:2]}


@pytest.mark.parametrize("reason", ["prompts", "host drafter", "not caught up", "plain steps", "not chosen", "slower"])
def test_drafts_wait_for_the_tokens_in_flight(reason: str) -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other")
    chunks, verification = in_flight(one, other)
    running = [] if reason == "prompts" else [one, other]
    if reason == "host drafter":
        speculation = Speculation(drafter, StepBudget(StepLimits(64)), 4, 64, DraftsPay())
        plain(speculation, 3)
    elif reason == "not caught up":
        drafter.not_caught_up = {other}
    elif reason == "plain steps":
        speculation = Speculation(
            drafter, StepBudget(StepLimits(64)), 4, 64, DraftsPay(), ahead=AheadDrafts(drafter, AlwaysAhead())
        )
    elif reason == "slower":
        speculation = Speculation(
            drafter,
            StepBudget(StepLimits(64)),
            4,
            64,
            DraftsPay(),
            is_certain=True,
            ahead=AheadDrafts(drafter, Never()),
        )
        plain(speculation, 3)
    found = None if reason == "not chosen" else verification
    assert speculation.needs_tokens(chunks, running, 2, found)
    assert speculation.choose([one, other], 2, is_behind=True) == {}


class Never(AheadPace):
    """Takes drafts behind a step in flight for slower than others."""

    def is_ahead(self, *_args: object, **_kwargs: object) -> bool:
        return False


def test_nobody_waits_for_a_sequence_whose_logits_are_edited() -> None:
    speculation, drafter = made()
    params = SamplingParams(frequency_penalty=0.5, min_tokens=9, logit_bias={3: 1.0}, bad_words_token_ids=[[3, 4]])
    one, other = decode(), decode("other", params=params)
    chunks, verification = in_flight(one, other)
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([one, other], 2, is_behind=True) == {one: DRAFTS, other: DRAFTS}
    assert len(drafter.behind) == 2


@pytest.mark.parametrize("has_drafts", [False, True])
def test_nobody_waits_for_a_sequence_with_a_grammar_which_has_forced_drafts_or_none(has_drafts: bool) -> None:
    speculation, drafter = made()
    one, bound = decode(), decode("bound")
    bound.grammar = Forcing(8, 9)  # type: ignore[assignment]  # as much of a grammar as is needed
    chunks, verification = in_flight(one, bound)
    if not has_drafts:
        bound.tokens[-2:], bound.num_unverified = [UNKNOWN], 0
        bound.num_computed -= 1
    assert not speculation.needs_tokens(chunks, [one, bound], 2, verification)
    found = speculation.choose([one, bound], 2, is_behind=True)
    assert found == {one: DRAFTS} | ({} if has_drafts else {bound: [8, 9]})
    assert [entry.sequence for entry in drafter.behind] == [one]


def test_nobody_waits_for_a_sequence_for_which_the_drafter_has_no_room() -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other")
    chunks, verification = in_flight(one, other)
    drafter.not_caught_up = drafter.lack_room = {other}
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([one, other], 2, is_behind=True) == {one: DRAFTS}


def test_forced_drafts_take_a_drafter_no_time() -> None:
    ahead = made()[0]._ahead
    assert ahead is not None
    assert [ahead.drafting_s(waited_s, is_ahead=False) for waited_s in (2e-3, 0.0)] == [2e-3, 0.0]
    assert ahead.drafting_s(0.0, is_ahead=True) == 2e-3


def test_nobody_waits_to_catch_up_with_an_answer_that_nearly_ends() -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other", max_tokens=9)
    chunks, verification = in_flight(one, other)
    drafter.not_caught_up = {other}
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([one, other], 2, is_behind=True) == {one: DRAFTS}

"""When drafts are made behind a step in flight, and when they wait for its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.draft_verification import DraftVerification, VerifiedRows
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.speculation.ahead_drafts import AheadDrafts
from lorafleet.workers.speculation.drafter import DeviceDrafts, Wanted
from lorafleet.workers.speculation.speculation import Speculation
from tests.workers.speculation.drafting import AlwaysAhead, DraftsPay
from tests.workers.speculation.test_speculation import Sevens, decode, plain

DRAFTS = [UNKNOWN] * 4


class OnDevice(Sevens):
    """Drafts behind any step for all sequences but those that it has not caught up with."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[Wanted] = []
        self.not_caught_up: set[Sequence] = set()

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        return entry.sequence in step.rows and entry.sequence not in self.not_caught_up

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
    assert speculation.on_device is not None and not drafter.wanted
    assert not speculation.choose([], 2)
    assert speculation.on_device is None


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


@pytest.mark.parametrize("reason", ["edits", "prompts", "host drafter", "not caught up", "plain steps", "not chosen"])
def test_drafts_wait_for_the_tokens_in_flight(reason: str) -> None:
    speculation, drafter = made()
    params: dict[str, Any] = {"frequency_penalty": 0.5} if reason == "edits" else {}
    one, other = decode(), decode("other", params=SamplingParams(**params))
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
    found = None if reason == "not chosen" else verification
    assert speculation.needs_tokens(chunks, running, 2, found)
    assert speculation.choose([one, other], 2, is_behind=True) == {}


def test_nobody_waits_to_catch_up_with_an_answer_that_nearly_ends() -> None:
    speculation, drafter = made()
    one, other = decode(), decode("other", max_tokens=9)
    chunks, verification = in_flight(one, other)
    drafter.not_caught_up = {other}
    assert not speculation.needs_tokens(chunks, [one, other], 2, verification)
    assert speculation.choose([one, other], 2, is_behind=True) == {one: DRAFTS}

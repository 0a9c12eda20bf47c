"""The rows of the tokens that a step samples, by request."""

from __future__ import annotations

import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.step.runner import FirstRows


def chunk(name: str, num_drafts: int = 0) -> Chunk:
    sequence = Sequence(name, [1], 1, SamplingParams(), seed=0, max_tokens=9)
    return Chunk(sequence, 1 + num_drafts, drafts=[2] * num_drafts)


@pytest.mark.parametrize(
    "order", [("first", "second", "third"), ("third", "first", "second"), ("second", "third", "first")]
)
def test_each_sequence_has_its_row_in_whichever_order_they_are_asked_for(order: tuple[str, ...]) -> None:
    rows = FirstRows([chunk("first"), chunk("second"), chunk("third")], has_drafts=False)
    assert {name: rows[name] for name in order} == {"first": 0, "second": 1, "third": 2} == dict(rows)


def test_the_rows_of_drafts_stand_between_those_of_sequences() -> None:
    rows = FirstRows([chunk("first", 2), chunk("second"), chunk("third", 1)], has_drafts=True)
    assert dict(rows) == {"first": 0, "second": 3, "third": 4}
    assert len(rows) == 3


def test_a_sequence_that_samples_nothing_has_no_row() -> None:
    assert FirstRows([chunk("first")], has_drafts=False).get("other") is None


def test_only_the_last_sequences_are_looked_at_for_the_last_one() -> None:
    unread = [chunk("first"), chunk("second")]
    rows = FirstRows([*unread, chunk("last")], has_drafts=False)
    unread[0].sequence.request_id = "changed"
    assert rows["last"] == 2
    assert rows["changed"] == 0

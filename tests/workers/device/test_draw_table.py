"""The draws of a step are those of each sequence alone, whatever rows the sequences have had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorafleet.kernels.sampling.draw_tokens import NO_COUNTS, DrawFields, DrawTable
from lorafleet.protocol.random_numbers import uniform
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.draw_table import DrawRows, Ints
from lorafleet.workers.device.logit_edits import EditedRow, LogitEdits
from lorafleet.workers.schedule.sequence import Chunk, Sequence


def chunk(num_tokens: int, seed: int, **params: float) -> Chunk:
    given = SamplingParams(**params)  # type: ignore[arg-type]  # numbers only
    sequence = Sequence(f"{seed}", [1] * num_tokens, num_tokens, given, seed, max_tokens=9, vocab_size=40)
    return Chunk(sequence, num_tokens)


def drawn(table_BF: DrawTable) -> list[DrawFields]:
    return [DrawFields(*row) for row in table_BF.tolist()]


def positions(*chunks: Chunk) -> Ints:
    """Returns the position of each token that the chunks sample."""
    first = [len(chunk.sequence.tokens) + chunk.sequence.num_unverified for chunk in chunks]
    return np.array([start + i for start, chunk in zip(first, chunks, strict=True) for i in range(chunk.num_sampled)])


def random(seed: int, position: int) -> float:
    return float(uniform(np.array([seed % 2**64], np.uint64), np.array([position], np.uint64))[0])


def test_each_row_has_its_own_parameters_and_the_draw_of_its_seed_and_position() -> None:
    sampled, greedy = chunk(5, -3, temperature=0.7, top_k=4, top_p=0.9), chunk(8, 6, temperature=0)
    first, second = drawn(DrawRows().of_step([sampled, greedy], positions(sampled, greedy), [], 50))
    assert first[:3] == (0.7, 4, 0.9)
    assert (first.draw, first.last_token, first.counts_row) == (random(-3, 5), 39, NO_COUNTS)
    assert (second.temperature, second.top_k, second.draw) == (0, 50, 0)


def test_a_row_behind_a_draft_is_drawn_as_if_the_drafts_were_the_answer() -> None:
    drafted, alone = replace(chunk(5, 1), num_tokens=7, drafts=[3, 4]), chunk(9, 2)
    rows = drawn(DrawRows().of_step([drafted, alone], positions(drafted, alone), [], 50))
    assert [row.draw for row in rows] == [random(1, 5), random(1, 6), random(1, 7), random(2, 9)]


@pytest.mark.parametrize("num_short", range(4))
def test_draws_by_length_are_those_of_the_length_that_a_sequence_turns_out_to_have(num_short: int) -> None:
    unverified, other = replace(chunk(5, 1), num_tokens=7, drafts=[3, 4]), chunk(9, 2, temperature=0)
    unverified.sequence.num_unverified = 3
    rows = DrawRows()
    by_length_BK = rows.by_length([unverified, other], positions(unverified, other), 3)
    assert by_length_BK.shape == (4, 4)
    unverified.sequence.num_unverified = 3 - num_short
    table = drawn(rows.of_step([unverified, other], positions(unverified, other), [], 50))
    assert by_length_BK[:, num_short].tolist() == [row.draw for row in table]
    assert table[0].draw == random(1, 8 - num_short) and table[3].draw == 0


def test_rows_of_sequences_that_have_ended_are_used_again() -> None:
    rows, kept = DrawRows(), chunk(5, 1, temperature=0.5)
    for seed in range(2, 90):
        other = chunk(5, seed, temperature=float(seed))
        first, second = drawn(rows.of_step([other, kept], positions(other, kept), [], 50))
        assert (first.temperature, first.draw) == (seed, random(seed, 5))
        assert (second.temperature, second.draw) == (0.5, random(1, 5))
        rows.release(other.sequence)
    assert len(rows) == 1


def test_edited_rows_name_the_counts_of_their_tokens() -> None:
    edits = LogitEdits(SamplingParams(), None, None, None, None, None)
    edited = EditedRow(1, edits, 0, sequence=1, counts_row=7)
    first, second = drawn(DrawRows().of_step([chunk(5, 1), chunk(5, 2)], np.array([5, 5]), [edited], 50))
    assert (first.counts_row, second.counts_row) == (NO_COUNTS, 7)

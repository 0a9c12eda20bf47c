"""Drafts that are copied from a sequence's own tokens."""

from __future__ import annotations

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_drafter import INDEXED_TOKENS, READ_TOKENS, NgramDrafter


def sequence(tokens: list[int], num_prompt: int = 1) -> Sequence:
    return Sequence("r", tokens, num_prompt, SamplingParams(), seed=0, max_tokens=5000)


def drafter() -> NgramDrafter:
    return NgramDrafter(SpeculativeConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=3))


def test_a_draft_is_what_followed_in_the_prompt_or_in_the_answer() -> None:
    made, seq = drafter(), sequence([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert made.propose([Wanted(seq, 9, 4)]) == [[3, 4, 5, 6]]
    seq.tokens += [9, 8, 1, 2]
    assert made.propose([Wanted(seq, 13, 2)]) == [[9, 8]], "the most recent place counts"
    seq.tokens += [5]
    assert made.propose([Wanted(seq, 14, 2)]) == [[]]


def test_a_phrase_that_repeats_goes_on_beyond_the_end() -> None:
    made = drafter()
    assert made.propose([Wanted(sequence([7, 7, 7]), 3, 5)]) == [[7] * 5]
    assert made.propose([Wanted(sequence([1, 2, 3, 1, 2, 3]), 6, 8)]) == [[1, 2, 3, 1, 2, 3, 1, 2]]


def test_a_token_in_flight_is_not_looked_at() -> None:
    seq = sequence([1, 2, 3, 1, 2, UNKNOWN])
    assert drafter().propose([Wanted(seq, 5, 2)]) == [[3, 1]]


def test_a_step_reads_a_bounded_part_of_long_prompts() -> None:
    made = drafter()
    long = [sequence([*range(10, 10 + INDEXED_TOKENS // 2), 11, 12]) for _ in range(3)]
    wanted = [Wanted(seq, len(seq.tokens), 1) for seq in long]
    assert made.propose(wanted) == [[13], [], []]
    assert made.propose(wanted) == [[13], [13], [13]]


def test_what_is_read_while_a_step_runs_is_drafted_from_at_once() -> None:
    made = drafter()
    long = [sequence([*range(10, 10 + READ_TOKENS // 2 - 2), 11, 12]) for _ in range(2)]
    made.read(long)
    for seq in long:
        seq.tokens.append(UNKNOWN)
    made.read(long)
    assert made.propose([Wanted(seq, len(seq.tokens) - 1, 1) for seq in long]) == [[13], [13]]


def test_a_sequence_that_has_ended_leaves_nothing() -> None:
    made, seq = drafter(), sequence([1, 2, 1, 2])
    made.propose([Wanted(seq, 4, 1)])
    made.release(seq)
    made.release(seq)
    assert not made._followed

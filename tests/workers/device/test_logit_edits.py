"""Edits of logits on the device give the numbers that a row by row computation from the whole history gives."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lorafleet.kernels.sampling.draw_tokens import NO_COUNTS
from lorafleet.kernels.sampling.penalties import penalize
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device import banned_sequences
from lorafleet.workers.device.host_copy import array_to_device
from lorafleet.workers.device.logit_edits import EditedStep, LogitEditor
from lorafleet.workers.schedule.kv_cache import SequenceBlocks
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence

VOCAB = 50
NEVER = float("-inf")
CPU = torch.device("cpu")


def sequence(tokens=(1, 2, 3), num_prompt=3, stop_ids=(), vocab_size=VOCAB, **params: Any) -> Sequence:
    made = Sequence("one", list(tokens), num_prompt, SamplingParams(**params), 0, 1000, stop_ids=frozenset(stop_ids))
    made.vocab_size = vocab_size
    made.blocks = SequenceBlocks(0, 0)
    return made


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def chunk(one: Sequence, drafts: Many[int] = ()) -> Chunk:
    return Chunk(one, one.num_uncomputed + len(drafts), drafts=drafts)


def prepare(editor: LogitEditor, batch: list[Sequence]) -> EditedStep:
    """Prepares a step of these sequences. Raises what one of them raises."""
    step = editor.prepare([chunk(one) for one in batch], torch.zeros(len(batch), dtype=torch.int64))
    for _, error in step.faults:
        raise error
    return step


def apply(editor: LogitEditor, logits_BV: torch.Tensor, step: EditedStep) -> None:
    """Applies the edits and then the penalties, as the choice of the tokens does."""
    editor.apply(logits_BV, step.rows)
    for row in step.rows:
        params, counts_row = row.edits.params, row.edits.counts_row
        if counts_row != NO_COUNTS:
            fields = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            penalize(logits_BV[row.index], editor.counts_SV[counts_row], *fields)


def edited(*batch: Sequence, vocab: int = VOCAB) -> torch.Tensor:
    """The logits of one step, of sequences that sample for the first time."""
    editor = LogitEditor(len(batch), VOCAB, CPU)
    found = logits(len(batch), vocab)
    apply(editor, found, prepare(editor, list(batch)))
    return found


def reference(logits_V: torch.Tensor, one: Sequence) -> None:
    """vLLM's order, from the whole history."""
    params = one.params
    if params.logit_bias:
        logits_V[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
    if params.allowed_token_ids:
        forbidden = torch.ones(len(logits_V), dtype=torch.bool)
        forbidden[params.allowed_token_ids] = False
        logits_V[forbidden] = NEVER
    answer = one.tokens[one.num_prompt :]
    for *before, last in params.bad_words_token_ids or ():
        if len(before) <= len(answer) and answer[len(answer) - len(before) :] == before:
            logits_V[last] = NEVER
    if one.stop_ids and one.num_generated < params.min_tokens:
        logits_V[list(one.stop_ids)] = NEVER
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(one.tokens)))
        value = logits_V[seen]
        logits_V[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    generated = one.tokens[one.num_prompt :]
    if generated and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(generated).unique(return_counts=True)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts


def test_logit_bias_forces_and_forbids():
    best = int(logits().argmax())
    assert edited(sequence(logit_bias={7: 100.0}))[0].argmax() == 7
    assert edited(sequence(logit_bias={best: -100.0}))[0].argmax() != best


def test_penalties_follow_their_formulas():
    base = logits()[0]
    tokens, num_prompt = [4, 4, 9, 9, 11], 2
    for params, expected in [
        ({"presence_penalty": 1.5}, {9: base[9] - 1.5, 11: base[11] - 1.5, 4: base[4]}),
        ({"frequency_penalty": 0.5}, {9: base[9] - 1.0, 11: base[11] - 0.5, 4: base[4]}),
        (
            {"repetition_penalty": 2.0},
            {t: base[t] / 2 if base[t] > 0 else base[t] * 2 for t in (4, 9, 11)} | {12: base[12]},
        ),
    ]:
        found = edited(sequence(tokens, num_prompt, **params))
        for token, value in expected.items():
            assert found[0, token] == pytest.approx(float(value)), params


def test_a_stop_token_cannot_come_before_min_tokens():
    best = int(logits().argmax())
    assert edited(sequence(min_tokens=2, stop_ids=[best]))[0].argmax() != best
    assert edited(sequence((1, 2, 3, 4, 5), 3, min_tokens=2, stop_ids=[best]))[0].argmax() == best
    assert torch.equal(edited(sequence(min_tokens=2)), logits())  # nothing could stop it


def random_sequence(rng: random.Random) -> Sequence:
    params: dict[str, Any] = {"max_tokens": 1000}
    if rng.random() < 0.6:
        params["repetition_penalty"] = rng.choice([0.7, 1.1, 1.3, 5.0])
    if rng.random() < 0.5:
        params["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        params["frequency_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.4:
        params["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.randrange(1, 9))}
    if rng.random() < 0.4:
        params["min_tokens"] = rng.randrange(1, 8)
    if rng.random() < 0.3:
        params["allowed_token_ids"] = rng.choices(range(VOCAB), k=30)
    if rng.random() < 0.4:
        params["bad_words_token_ids"] = [rng.choices(range(4), k=rng.randrange(1, 5)) for _ in range(20)]
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    return sequence(tokens, len(tokens), stop_ids=rng.sample(range(VOCAB), 3), **params)


def test_many_rows_over_many_steps_have_the_numbers_of_the_whole_history():
    """Sequences begin, end, are preempted and come again, and each step is prepared before the last one's tokens are
    known. All numbers are equal to the bit."""
    rng = random.Random(3)
    editor = LogitEditor(8, VOCAB, CPU)
    running: list[Sequence] = []
    preempted: list[Sequence] = []
    for step in range(400):
        while len(running) < 8 and rng.random() < 0.7:
            comes = preempted.pop() if preempted and rng.random() < 0.5 else random_sequence(rng)
            comes.blocks = SequenceBlocks(0, 0)
            running.append(comes)
        rng.shuffle(running)
        batch = [one for one in running if one.num_generated == 0 or rng.random() < 0.9]
        found = logits(len(batch), seed=step)
        expected = found.clone()
        chosen = [rng.randrange(rng.choice([4, VOCAB])) for _ in batch]  # banned sequences have tokens below 4
        rows = prepare(editor, batch)
        for logits_V, one in zip(expected, batch, strict=True):
            assert one.tokens[-1] != UNKNOWN
            reference(logits_V, one)
        apply(editor, found, rows)
        assert torch.equal(found, expected)
        editor.count(torch.tensor(chosen, dtype=torch.int64), rows)
        for one in batch:
            one.tokens.append(UNKNOWN)
        prepare(editor, batch)  # the next step, launched before this one's tokens are read
        for one, token in zip(batch, chosen, strict=True):
            one.tokens[-1] = token
        for one in list(running):
            fate = rng.random()
            if fate < 0.05:
                running.remove(one)
                editor.release(one)
            elif fate < 0.1:
                running.remove(one)
                one.blocks = None
                preempted.append(one)
    assert editor.counts_SV.nbytes == 8 * VOCAB * 4


def test_memory_grows_with_the_rows_that_are_held_up_to_the_sequences_of_a_step():
    editor = LogitEditor(20, VOCAB, CPU)
    assert editor.counts_SV.nbytes == 0
    held = [sequence(repetition_penalty=1.1) for _ in range(20)]
    sizes = []
    for one in held:
        prepare(editor, [one])
        sizes.append(len(editor.counts_SV))
    assert sizes == [8] * 8 + [16] * 8 + [20] * 4
    for one in held:
        editor.release(one)
    for _ in range(100):
        one = sequence(presence_penalty=0.5)
        prepare(editor, [one])
        editor.release(one)
    assert len(editor.counts_SV) == 20
    assert not editor._edits


def test_a_wider_vocabulary_of_an_adapter_keeps_the_counts_of_the_others():
    editor = LogitEditor(4, VOCAB, CPU)
    narrow = sequence((1, 2, 3), 2, repetition_penalty=2.0)
    wide = sequence((1, VOCAB + 9), 2, repetition_penalty=2.0, vocab_size=VOCAB + 10)
    batch = [narrow]
    editor.count(torch.tensor([7]), prepare(editor, batch))
    narrow.tokens.append(7)
    batch = [narrow, wide]
    found = logits(2, VOCAB + 10)
    expected = found.clone()
    rows = prepare(editor, batch)
    for logits_V, one in zip(expected, batch, strict=True):
        reference(logits_V, one)
    apply(editor, found, rows)
    assert torch.equal(found, expected)
    editor.count(torch.tensor([8, VOCAB + 9]), rows)
    narrow.tokens.append(8)
    expected = logits()
    reference(expected[0], narrow)
    found = logits()  # a step of narrow rows alone has logits of the base's vocabulary
    apply(editor, found, prepare(editor, [narrow]))
    assert torch.equal(found, expected)


def test_a_row_of_counts_keeps_nothing_of_a_wider_vocabulary():
    editor = LogitEditor(2, VOCAB, CPU)
    wide = sequence(range(VOCAB, VOCAB + 30), 30, repetition_penalty=2.0, vocab_size=VOCAB + 30)
    prepare(editor, [wide])
    editor.release(wide)
    batch = [sequence((1,), 1, repetition_penalty=2.0), sequence(range(20), 20, repetition_penalty=2.0)]
    found = logits(2)
    expected = found.clone()
    apply(editor, found, prepare(editor, batch))
    for logits_V, one in zip(expected, batch, strict=True):
        reference(logits_V, one)
    assert torch.equal(found, expected)


def test_a_first_token_has_nothing_to_be_penalized_for():
    assert torch.equal(edited(sequence(presence_penalty=2.0), sequence(frequency_penalty=2.0)), logits(2))


def test_a_sequence_whose_tokens_are_not_known_cannot_begin():
    with pytest.raises(RuntimeError, match="not known"):
        prepare(LogitEditor(2, VOCAB, CPU), [sequence((1, 2, UNKNOWN), 2, repetition_penalty=2.0)])


def test_biases_are_added_in_float32():
    editor = LogitEditor(1, VOCAB, CPU)
    coarse = torch.full((1, VOCAB), 100.0, dtype=torch.bfloat16)
    found = editor.apply(coarse, prepare(editor, [sequence(logit_bias={3: 0.1})]).rows)
    assert found.dtype == torch.float32
    assert found[0, 3] == pytest.approx(100.1)


class WrittenValues(TorchDispatchMode):
    """Records the shapes of the values that are written to places of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default:
            self.shapes.append(args[2].shape)
        return func(*args, **(kwargs or {}))


def test_no_edit_writes_a_number_of_the_host_for_whose_copy_the_device_would_wait() -> None:
    editor = LogitEditor(1, VOCAB, CPU)
    one = sequence(
        min_tokens=2,
        stop_ids=[4, 5],
        bad_words_token_ids=[[7], [8], [3, 6]],
        allowed_token_ids=[1, 2],
        logit_bias={3: 1, 4: 2},
    )
    step = prepare(editor, [one])
    with WrittenValues() as written:
        editor.apply(logits(), step.rows)
    assert len(written.shapes) == 5
    assert all(written.shapes), "a value without a dimension is a number of the host"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_on_a_gpu_no_edit_waits_for_the_device() -> None:
    device = torch.device("cuda")
    editor = LogitEditor(8, VOCAB, device)
    fields: dict[str, Any] = {"min_tokens": 9, "allowed_token_ids": [1, 2, 3], "repetition_penalty": 1.5}
    banned = [[7], [3, 6], [4, 5, 6]]
    one = sequence(stop_ids=(4,), bad_words_token_ids=banned, logit_bias={3: 1, 4: 2}, **fields)
    token_B = torch.tensor([3, 4, 5], device=device)
    accepted_S, short_1 = torch.tensor([1], device=device), torch.tensor([1], device=device)
    logits_BV = logits(3).to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step = editor.prepare([chunk(one, [UNKNOWN] * 2)], token_B, {one: short_1})
            editor.apply(logits_BV.clone(), step.rows)
            editor.count(token_B, step, accepted_S)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not step.faults


def test_what_a_sequence_edits_is_uploaded_once(monkeypatch):
    editor = LogitEditor(2, VOCAB, CPU)
    one = sequence(logit_bias={3: 1.0}, min_tokens=9, stop_ids=[4], repetition_penalty=1.5)
    prepare(editor, [one])
    monkeypatch.setattr(editor, "_upload", None)
    monkeypatch.setattr(editor._counts, "_fill", None)
    for _ in range(3):
        rows = prepare(editor, [one])
        apply(editor, logits(), rows)
        editor.count(torch.tensor([5]), rows)
        one.tokens.append(UNKNOWN)


def test_a_step_uploads_no_more_for_many_banned_sequences_than_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def record(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        sizes.append(array.size)
        return array_to_device(array, device)

    def uploaded(banned: list[list[int]]) -> list[int]:
        editor, batch = LogitEditor(2, VOCAB, CPU), [sequence(bad_words_token_ids=banned) for _ in range(2)]
        prepare(editor, batch)
        with monkeypatch.context() as patch:
            patch.setattr(banned_sequences, "array_to_device", record)
            step = prepare(editor, batch)
            apply(editor, logits(2), step)
            editor.count(torch.tensor([5, 6]), step)
        return [sizes.pop(0) for _ in range(len(sizes))]

    assert uploaded([[1, 2]]) == uploaded([[i, j, 7] for i in range(VOCAB) for j in range(9)])


def test_a_row_behind_drafts_is_edited_as_if_the_drafts_were_the_answer():
    """Penalties, minimal lengths and banned sequences see them; the row of the sequence's own last token does not. The
    host need not know the drafts."""
    fields = {"frequency_penalty": 1.0, "min_tokens": 3, "bad_words_token_ids": [[4, 5], [3, 4, 6], [5, 6]]}
    drafts = [4, 5]
    editor = LogitEditor(4, VOCAB, CPU)
    one, other = sequence((1, 2, 3), 2, stop_ids=(7,), **fields), sequence((6, 4), 1, frequency_penalty=2.0)
    step = editor.prepare([chunk(other), chunk(one, [UNKNOWN] * 2)], torch.tensor([4, 3, *drafts]))
    assert not step.faults
    logits_BV = editor.apply(torch.zeros(4, VOCAB), step.rows)
    assert editor.counts_SV[step.rows[0].counts_row].nonzero().tolist() == [[4]]
    for i, row in enumerate(step.rows[1:]):
        tokens = (1, 2, 3, *drafts[:i])
        alone = LogitEditor(1, VOCAB, CPU)
        expected = prepare(alone, [sequence(tokens, 2, stop_ids=(7,), **fields)])
        assert torch.equal(logits_BV[1 + i], alone.apply(torch.zeros(1, VOCAB), expected.rows)[0]), i
        assert torch.equal(editor.counts_SV[row.counts_row], alone.counts_SV[expected.rows[0].counts_row]), i
        assert row.num_generated == 1 + i


@pytest.mark.parametrize("num_accepted", range(3))
def test_the_next_step_is_edited_behind_the_accepted_drafts_before_the_host_knows_them(num_accepted: int) -> None:
    """Another answer has no drafts in the same step, and one has drafts and no banned sequences."""
    banned = [[4], [3, 4], [4, 5, 6], [9, 9, 8], [5, 9, 1], [4, 9, 2], [9, 3]]
    fields: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "min_tokens": 4}
    editor = LogitEditor(12, VOCAB, CPU)
    one = sequence((1, 2, 3), 2, stop_ids=(7,), bad_words_token_ids=banned, **fields)
    plain = sequence((1, 9), 1, bad_words_token_ids=banned)
    other = sequence((1, 2), 1, frequency_penalty=1.0)
    first = editor.prepare(
        [chunk(one, [UNKNOWN] * 2), chunk(plain), chunk(other, [UNKNOWN])], torch.tensor([3, 4, 5, 9, 2, 6])
    )
    drawn = [[9, 4, 5], [4, 9, 5], [4, 5, 9]][num_accepted]
    drawn_B = torch.tensor([*drawn, 9, 6, 7])
    editor.count(drawn_B, first, torch.tensor([num_accepted, 0, 1]))
    for sent, num_drafts in ((one, 2), (plain, 0), (other, 1)):
        sent.num_computed, sent.num_unverified = len(sent.tokens), num_drafts
        sent.tokens.append(UNKNOWN)
    shorts = {one: torch.tensor([2 - num_accepted])}
    second = editor.prepare(
        [chunk(one, [UNKNOWN]), chunk(plain), chunk(other)], torch.tensor([drawn[num_accepted], 9, 9, 7]), shorts
    )
    assert not second.faults
    found, known = logits(4), (1, 2, 3, *drawn[: num_accepted + 1])
    answers = [
        sequence(known, 2, stop_ids=(7,), bad_words_token_ids=banned, **fields),
        sequence((*known, 9), 2, stop_ids=(7,), bad_words_token_ids=banned, **fields),
        sequence((1, 9, 9), 1, bad_words_token_ids=banned),
        sequence((1, 2, 6, 7), 1, frequency_penalty=1.0),
    ]
    expected = found.clone()
    for logits_V, answer in zip(expected, answers, strict=True):
        reference(logits_V, answer)
    apply(editor, found, second)
    assert torch.equal(found, expected)


def test_a_sequence_that_gets_no_token_goes_on_from_where_it_was() -> None:
    editor = LogitEditor(6, VOCAB, CPU)
    batch = [sequence((1, 4), 1, frequency_penalty=1.0, bad_words_token_ids=[[4, 5], [4, 6, 7]]) for _ in range(2)]
    tokens = torch.tensor([4, 6, 4, 6])
    step = editor.prepare([chunk(one, [6]) for one in batch], tokens)
    editor.count(torch.tensor([6, 8, 6, 8]), step, torch.tensor([1, 1]), late_rows={2})
    batch[0].tokens += [6, 8]
    found, expected = logits(2), logits(2)
    for logits_V, one in zip(expected, batch, strict=True):
        reference(logits_V, one)
    apply(editor, found, prepare(editor, batch))
    assert torch.equal(found, expected)


def test_answers_with_many_places_of_banned_sequences_move_on_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banned_sequences, "MOST_PLACES", 3)
    monkeypatch.setattr(banned_sequences, "MOST_ENDS", 2)
    editor = LogitEditor(8, VOCAB, CPU)
    banned = [[[4, 5, 6]], [[4, 6], [5, 4, 3]], [[6, 4]]]
    batch = [sequence((1, 4), 1, bad_words_token_ids=own) for own in banned]
    for drawn in ([5, 5, 6], [6, 4, 4], [9, 3, 4]):
        found, expected = torch.zeros(3, VOCAB), torch.zeros(3, VOCAB)
        for logits_V, one in zip(expected, batch, strict=True):
            reference(logits_V, one)
        step = prepare(editor, batch)
        with WrittenValues() as written:
            apply(editor, found, step)
        assert written.shapes == [(1,), (2,), (1,)], "the first two answers have three ends together"
        assert torch.equal(found, expected)
        editor.count(torch.tensor(drawn), step)
        for one, token in zip(batch, drawn, strict=True):
            one.tokens.append(token)


def test_the_rows_of_drafts_are_free_for_the_next_step():
    editor = LogitEditor(3, VOCAB, CPU)
    one = sequence((1, 2, 3), 2, presence_penalty=1.0)
    for _ in range(4):
        step = editor.prepare([chunk(one, [8, 8])], torch.tensor([one.tokens[-1], 8, 8]))
        editor.count(torch.tensor([9, 8, 8]), step, torch.tensor([0]))
        one.tokens += [9]
    assert len(editor.counts_SV) == 3

"""Acceptance as it is measured in one pass, compared with drafting token by token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from lorafleet.tools.drafts.answer_batches import IGNORED, answer_batches
from lorafleet.tools.drafts.draft_acceptance import DraftAcceptance, acceptance_of, measure_acceptance
from lorafleet.tools.drafts.draft_target import TargetAnswer
from tiny_models import load_base

K = 4


@pytest.mark.parametrize(
    ("right", "num_steps"),
    [
        ([], 0),
        ([True], 0),  # The prompt gives the first token.
        ([False, True, True], 1),
        ([True, False, False], 2),
        ([False, True, True, False, True], 2),
        ([True] * 11, 2),  # 4 accepted tokens and the target's own, twice.
        ([True] * 12, 3),
    ],
)
def test_a_step_gives_the_tokens_up_to_the_first_wrong_one(right, num_steps):
    assert acceptance_of([right], K) == DraftAcceptance(len(right), sum(right), max(len(right) - 1, 0), num_steps)


def test_several_answers_count_by_their_tokens():
    found = acceptance_of([[True] * 6, [False, False]], K)
    assert found.share == 6 / 8
    assert found.length == 6 / 2


def drafted(draft: Callable[[list[int]], int], answers: list[TargetAnswer]) -> tuple[int, int]:
    """Returns the tokens and the steps of a loop that drafts K tokens one after another."""
    tokens = steps = 0
    for answer in answers:
        known = 1
        while known < len(answer.answer):
            text = [*answer.prompt, *answer.answer[:known]]
            for _ in range(K):
                text.append(draft(text))
            guesses = text[len(answer.prompt) + known :]
            rest = list(answer.answer[known:])
            accepted = next((i for i, (g, t) in enumerate(zip(guesses, rest, strict=False)) if g != t), None)
            accepted = min(K, len(rest)) if accepted is None else accepted
            tokens += min(accepted + 1, len(rest))
            known += accepted + 1
            steps += 1
    return tokens, steps


def test_one_pass_finds_what_drafting_finds(base):
    model = load_base(base)
    rng = random.Random(0)

    @torch.inference_mode()
    def draft(text: list[int]) -> int:
        return int(model(torch.tensor([text])).logits[0, -1].argmax())

    answers = []
    for _ in range(4):  # Answers of the model itself, of which some tokens are others.
        text = [rng.randrange(5, 300) for _ in range(rng.randrange(3, 9))]
        start = len(text)
        for _ in range(rng.randrange(8, 16)):
            text.append(draft(text) if rng.random() < 0.8 else rng.randrange(5, 300))
        answers.append(TargetAnswer(text[:start], text[start:]))
    found = measure_acceptance(model, answers, K, tokens_per_batch=50)
    assert (found.num_verified, found.num_steps) == drafted(draft, answers)
    assert 0.5 < found.share < 1
    assert found.num_tokens == sum(len(answer.answer) for answer in answers)


def test_batches_have_each_answer_once_and_few_tokens():
    answers = [
        TargetAnswer([1] * p, [100 + i] * a) for i, (p, a) in enumerate([(3, 2), (9, 1), (2, 7), (40, 3), (3, 2)])
    ]
    for rng in (None, random.Random(0)):
        batches = list(answer_batches(answers, 20, rng))
        assert all(batch.ids_BT.numel() <= 20 or len(batch.ids_BT) == 1 for batch in batches)
        found = [
            (label, int((row == label).sum()))
            for batch in batches
            for row in batch.labels_BT
            for label in row.unique().tolist()
            if label != IGNORED
        ]
        assert sorted(found) == [(100, 2), (101, 1), (102, 7), (103, 3), (104, 2)]

"""Groups prompts and answers into padded batches, in which only the answers' tokens are predicted."""

# B answers in a batch · T tokens of the longest one, or the places from the first answer's first token on

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.tools.drafts.draft_target import TargetAnswer

IGNORED = -100  # Label of places that are not in an answer, as in torch's cross entropy.


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Some prompts with their answers, all int64."""

    ids_BT: Tensor  # Prompts and answers. Rows are padded at their ends, which no earlier place attends to.
    places_T: Tensor  # Places whose logits are needed: from the last token of the shortest prompt on.
    labels_BT: Tensor  # The next token at each of these places, or IGNORED.

    def to(self, device: torch.device) -> AnswerBatch:
        return AnswerBatch(self.ids_BT.to(device), self.places_T.to(device), self.labels_BT.to(device))


def answer_batches(
    answers: Sequence[TargetAnswer], tokens_per_batch: int, rng: random.Random | None = None
) -> Iterator[AnswerBatch]:
    """Yields batches of at most that many tokens with their padding, or of one answer. Answers of like length share a
    batch. With a random generator, the batches and the answers of one length come in random order."""
    order = list(answers)
    if rng is not None:
        rng.shuffle(order)
    order.sort(key=lambda answer: answer.num_tokens)
    groups: list[list[TargetAnswer]] = []
    for answer in order:  # The longest of a group comes last.
        if not groups or (len(groups[-1]) + 1) * answer.num_tokens > tokens_per_batch:
            groups.append([])
        groups[-1].append(answer)
    if rng is not None:
        rng.shuffle(groups)
    yield from map(_padded, groups)


def _padded(group: Sequence[TargetAnswer]) -> AnswerBatch:
    length = max(answer.num_tokens for answer in group)
    first = min(len(answer.prompt) for answer in group) - 1
    ids_BT = torch.zeros(len(group), length, dtype=torch.int64)
    labels_BT = torch.full((len(group), length), IGNORED, dtype=torch.int64)
    for row, answer in enumerate(group):
        ids_BT[row, : answer.num_tokens] = torch.tensor([*answer.prompt, *answer.answer])
        labels_BT[row, len(answer.prompt) - 1 : answer.num_tokens - 1] = torch.tensor(answer.answer)
    return AnswerBatch(ids_BT, torch.arange(first, length), labels_BT[:, first:])

"""Measures how many of a target's greedy tokens a draft predicts, without an engine.

A draft token is accepted if it and all before it in the draft are the target's. So up to its first wrong token, a
draft continues the target's own text, and one pass over an answer tells how much of each draft would be accepted.
"""

# B answers in a batch · T places of answer_batches.py

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lorafleet.tools.drafts.answer_batches import IGNORED, answer_batches
from lorafleet.tools.drafts.draft_target import TargetAnswer


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """The quality of a draft on some answers of the target."""

    num_tokens: int  # Tokens of the answers.
    num_right: int  # Those that are the draft's likeliest token after the target's own tokens.
    num_verified: int  # Tokens that steps with drafts gave: all but the first of each answer, which the prompt gives.
    num_steps: int  # Steps that verified them.

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft predicts."""
        return self.num_right / max(self.num_tokens, 1)

    @property
    def length(self) -> float:
        """Mean number of tokens per step with drafts. It counts the target's own token, as vLLM does."""
        return self.num_verified / max(self.num_steps, 1)


@torch.inference_mode()
def measure_acceptance(
    model: nn.Module, answers: Sequence[TargetAnswer], k: int, tokens_per_batch: int
) -> DraftAcceptance:
    """Measures a draft on greedy answers of the target, for drafts of k tokens."""
    model.eval()
    hits: list[list[bool]] = []
    for batch in answer_batches(answers, tokens_per_batch):
        on_device = batch.to(next(model.parameters()).device)
        best_BT = model(on_device.ids_BT, logits_to_keep=on_device.places_T).logits.argmax(-1)
        for right_T, label_T in zip(best_BT == on_device.labels_BT, on_device.labels_BT, strict=True):
            hits.append(right_T[label_T != IGNORED].tolist())
    return acceptance_of(hits, k)


def acceptance_of(hits: Iterable[Sequence[bool]], k: int) -> DraftAcceptance:
    """Computes the acceptance from one list for each answer: for each token, whether the draft predicts it."""
    num_tokens = num_right = num_verified = num_steps = 0
    for right in hits:
        num_tokens += len(right)
        num_right += sum(right)
        num_verified += max(len(right) - 1, 0)
        place = 1
        while place < len(right):
            num_accepted = 0
            while num_accepted < k and place + num_accepted < len(right) and right[place + num_accepted]:
                num_accepted += 1
            place += num_accepted + 1
            num_steps += 1
    return DraftAcceptance(num_tokens, num_right, num_verified, num_steps)

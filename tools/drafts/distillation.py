"""Trains a draft, or the adapter of a draft, to predict the answers of its target.

The loss is the cross entropy of the target's own answers, which is distillation at the level of sequences
(Kim and Rush, 2016, arXiv 1606.07947).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lorafleet.tools.drafts.answer_batches import AnswerBatch, answer_batches
from lorafleet.tools.drafts.draft_target import TargetAnswer

MAX_NORM = 1.0  # A gradient with a larger norm is scaled down to this one.
WARMUP_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The options of one training."""

    epochs: int = 3  # Passes over the answers.
    learning_rate: float = 1e-3  # The largest; it rises at first and then falls to 0 in a straight line.
    tokens_per_batch: int = 2048  # Tokens of prompts, answers and padding in one step.
    seed: int = 0


def distil(
    model: nn.Module, answers: Sequence[TargetAnswer], plan: TrainingPlan, report: Callable[[str], None]
) -> None:
    """Trains the model's weights that require gradients, on the model's device. On a GPU, it computes in bf16."""
    device = next(model.parameters()).device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    num_steps = plan.epochs * sum(1 for _ in answer_batches(answers, plan.tokens_per_batch))
    warmup = max(1, round(WARMUP_SHARE * num_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (num_steps - step) / num_steps)
    )
    rng = random.Random(plan.seed)
    model.train()
    for epoch in range(plan.epochs):
        total, count = 0.0, 0
        for batch in answer_batches(answers, plan.tokens_per_batch, rng):
            total += _step(model, batch.to(device), weights, optimizer)
            schedule.step()
            count += 1
        report(f"  epoch {epoch + 1} of {plan.epochs}: loss {total / count:.3f}")


def _step(
    model: nn.Module, batch: AnswerBatch, weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> float:
    with torch.autocast(batch.ids_BT.device.type, torch.bfloat16, enabled=batch.ids_BT.is_cuda):
        logits_BTV = model(batch.ids_BT, logits_to_keep=batch.places_T).logits
    loss = nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch.labels_BT.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(weights, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

"""Computes what an adapter adds to each expert of a mixture. merging.py adds the deltas to the weights."""

# E experts · G groups of outputs · R rank · D in features · O out features

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.adapters.forms import ExpertsForm, StackedLowRank


def expert_delta(stack: StackedLowRank, expert: int) -> Tensor:
    """Returns what the stack adds to one expert's weight, as [O, D] in float32."""
    a_GRD, scaling_G = stack.a_EGRD.of_expert(expert), stack.scaling_EG[expert].tolist()
    parts = stack.b_EPOR.of_expert(expert).flatten(0, 1).chunk(len(a_GRD))
    return torch.cat([s * (b_OR @ a_RD) for s, b_OR, a_RD in zip(scaling_G, parts, a_GRD, strict=True)])


def num_experts(form: ExpertsForm) -> int:
    return form.stacks[0].b_EPOR.shape[0]

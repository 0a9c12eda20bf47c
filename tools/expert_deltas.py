"""Computes what an adapter adds to each expert of a mixture, and finds the names under which a checkpoint stores the
experts. merging.py adds the deltas to the weights."""

# E experts · G groups of outputs · R rank · D in features · O out features

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lorafleet.workers.adapters.forms import ExpertsForm, StackedLowRank
from lorafleet.workers.bases.expert_names import mixtral_name


def expert_delta(stack: StackedLowRank, expert: int) -> Tensor:
    """Returns what the stack adds to one expert's weight, as [O, D] in float32."""
    a_GRD, scaling_G = stack.a_EGRD[expert].float(), stack.scaling_EG[expert].tolist()
    parts = stack.b_EOR[expert].float().chunk(len(a_GRD))
    return torch.cat([s * (b_OR @ a_RD) for s, b_OR, a_RD in zip(scaling_G, parts, a_GRD, strict=True)])


def num_experts(form: ExpertsForm) -> int:
    return form.stacks[0].b_EOR.shape[0]


def stored_name(name: str, stored: Collection[str]) -> str:
    """Returns the checkpoint's name for a tensor that the engine calls `name`. Mixtral's checkpoints use their own
    names."""
    if name in stored or ".mlp." not in name:
        return name
    own = mixtral_name(name)
    return own if own in stored else name

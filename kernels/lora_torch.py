"""LoRA of a mixed batch in plain torch: the CPU's serving path and the Triton kernels' reference.

Two forms of the same sum. Few tokens: all of the step's adapters stacked into one wide adapter, each token's row masked
to its own columns, so three operators serve any mix. Many tokens: one pair of GEMMs for each adapter's own tokens, so
that arithmetic is not multiplied by the number of adapters.
Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens · D in · O out · C columns of all stacked ranks

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.packed_lora import PackedLoRA, SlotWeights

# Wasted multiply-adds that cost as much as one more operator launch: 10 us at about 20 GFLOP/s a core.
STACK_LIMIT = 1 << 21


def apply_lora_torch(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += scale * B[slot[t]] @ (A[slot[t]] @ x[t]) in place; base tokens' rows are not changed."""
    columns = sum(w.total_rank for s in batch.slots if (w := packed.slots[s]) is not None)
    if len(batch.slots) > 1 and batch.num_tokens * columns * (x_TD.shape[1] + y_TO.shape[1]) > STACK_LIMIT * len(
        batch.slots
    ):
        _apply_grouped(x_TD, y_TO, packed, batch)
    else:
        _apply_stacked(x_TD, y_TO, packed, batch)


def _apply_stacked(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    stacked = packed.stacked(batch.slots)
    if stacked is not None:
        p_TC = (x_TD @ stacked.a_DC) * stacked.scale_NC[batch.active_T]
        y_TO.addmm_(p_TC, stacked.b_CO)


def _apply_grouped(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
        weights = packed.slots[slot]
        if weights is not None:
            rows = batch.order_T[start:end]
            y_TO.index_add_(0, rows, lora_delta(x_TD[rows], weights, packed.out_features))


def lora_delta(x_TD: Tensor, weights: SlotWeights, out_features: tuple[int, ...]) -> Tensor:
    """What one adapter adds to one packed linear's output, [T, sum of out_features], in x's dtype."""
    p_TR = x_TD @ weights.a_RD.T
    parts: list[Tensor] = []
    row = 0
    for b_OR, scale, out in zip(weights.b, weights.scales, out_features, strict=True):
        if b_OR is None:
            parts.append(x_TD.new_zeros(x_TD.shape[0], out))
        else:
            parts.append((p_TR[:, row : row + b_OR.shape[1]] * scale) @ b_OR.T)
            row += b_OR.shape[1]
    return torch.cat(parts, dim=1)

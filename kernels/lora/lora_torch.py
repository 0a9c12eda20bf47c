"""LoRA of a mixed batch in plain torch: the CPU's serving path and the Triton kernels' reference.

The same sum has two forms:

- Few tokens: all of the step's adapters are stacked into one wide adapter, and each token's row is masked to its own
  columns. Three operators then serve any mix.
- Many tokens: each adapter's own tokens take one pair of GEMMs, so that the arithmetic is not multiplied by the number
  of adapters.

FP8 weights become float32, which holds each exactly. x must be float32 too: see kernels/lora/apply_lora.py.
Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens · D in · O out · C columns of P: of all stacked ranks, or of one adapter's · N parts of A's rows

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.lora.packed_lora import PackedLoRA, SlotWeights

# Wasted multiply-adds that cost as much as one more operator launch: 10 us at about 20 GFLOP/s per core.
STACK_LIMIT = 1 << 21


def apply_lora_torch(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds scale * B[slot[t]] @ (A[slot[t]] @ x[t]) to y[t] in place. Base tokens' rows are not changed.

    All ranks that exchange P choose the same form, since their shapes of x and y are the same.
    """
    columns = sum(sum(w.ranks) for s in batch.slots if (w := packed.slots[s]) is not None)
    if len(batch.slots) > 1 and batch.num_tokens * columns * (x_TD.shape[1] + y_TO.shape[1]) > STACK_LIMIT * len(
        batch.slots
    ):
        _apply_grouped(x_TD, y_TO, packed, batch)
    else:
        _apply_stacked(x_TD, y_TO, packed, batch)


def _apply_stacked(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    stacked = packed.stacked(batch.slots)
    if stacked is not None:
        scale_TC = stacked.scale_NC[batch.active_T]
        # If another adapter's columns overflow, zero times infinity would be NaN.
        p_TC = (x_TD @ stacked.a_DC).mul_(scale_TC).masked_fill_(scale_TC == 0, 0)
        p_NTC = packed.layout.exchanged(p_TC)
        packed.part_of(y_TO).addmm_(p_NTC.transpose(0, 1).reshape(len(x_TD), -1), stacked.b_CO)


def _apply_grouped(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Applies one adapter after the other. P of all tokens, in order_T, is complete before any B is applied, so that
    ranks exchange it once for each linear and not once for each adapter."""
    layout = packed.layout
    present = [(w, span) for s, span in zip(batch.slots, batch.spans, strict=True) if (w := packed.slots[s])]
    if not present:
        return
    most = max(sum(map(layout.columns, w.ranks)) for w, _ in present)
    p_TC = x_TD.new_zeros(batch.spans[-1][1], most)
    for weights, (start, end) in present:
        _shrink(x_TD[batch.order_T[start:end]], weights, layout, p_TC[start:end])
    p_NTC = layout.exchanged(p_TC)
    part_TO = packed.part_of(y_TO)
    for weights, (start, end) in present:
        delta_TO = _expand(p_NTC[:, start:end], weights, layout, packed.out_features)
        part_TO.index_add_(0, batch.order_T[start:end], delta_TO)


def _shrink(x_TD: Tensor, weights: SlotWeights, layout: LoRALayout, p_TC: Tensor) -> None:
    """Writes one adapter's columns of P. Columns that this rank's part does not fill are left unchanged."""
    a_TR = x_TD @ weights.a_RD.T.to(x_TD.dtype)
    row = column = 0
    for p, rank in enumerate(weights.ranks):
        rows = layout.num_rows(rank)
        own = slice(row, row + rows)
        torch.mul(a_TR[:, own], weights.scale(p, own), out=p_TC[:, column : column + rows])
        row += rows
        column += layout.columns(rank)


def _expand(p_NTC: Tensor, weights: SlotWeights, layout: LoRALayout, out_features: tuple[int, ...]) -> Tensor:
    """Returns what one adapter adds to this rank's columns of the output, [T, sum of out_features], in P's dtype."""
    num_tokens = p_NTC.shape[1]
    parts: list[Tensor] = []
    column = 0
    for b_OR, rank, out in zip(weights.b, weights.ranks, out_features, strict=True):
        if b_OR is None:
            parts.append(p_NTC.new_zeros(num_tokens, out))
        else:
            own_NTC = p_NTC[:, :, column : column + layout.columns(rank)]
            parts.append(own_NTC.transpose(0, 1).reshape(num_tokens, -1)[:, :rank] @ b_OR.T.to(p_NTC.dtype))
            column += layout.columns(rank)
    return torch.cat(parts, dim=1)

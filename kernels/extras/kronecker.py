"""Adapters that add a Kronecker product: y += scale * (w1 (x) w2) x, without ever making the product.

Output o1 * O2 + o2 reads input d1 * D2 + d2, so x and y are matrices [D1, D2] and [O1, O2], and what is added is
w1 @ x @ w2.T. Each rank of a tensor-parallel group holds w1 and w2 whole: its range of inputs or outputs is contiguous
(of fused projections there are a few) and may begin within a row of that matrix. It takes the rest of x for zeros, and
leaves the rest of y out.

For the Triton kernel a slot's products on one packed linear are a record: for each slice int64 (byte offset of w1, of
w2, O1, D1, O2, D2, the float32 scale's bits, 0), offsets from the record's own address; O1 = 0: the slice has none.
"""

# T tokens · O1, O2 output factors · D1, D2 input factors

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lorafleet.kernels.lora.lora_batch import LoRABatch
    from lorafleet.kernels.lora.packed_lora import PackedLoRA

RECORD_FIELDS = 8


@dataclass(frozen=True, slots=True)
class KroneckerPart:
    """Of one slice: w1 [O1, D1], w2 [O2, D2], whole on every rank, of one dtype."""

    w1: Tensor
    w2: Tensor
    scale: float


def apply_kronecker(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y += each token's own product, in place; nothing where no slot of the step has one."""
    if not batch.has_kronecker:
        return
    if x_TD.is_cuda:
        from lorafleet.kernels.extras.kronecker_triton import apply_kronecker_triton  # triton is optional on a CPU

        apply_kronecker_triton(x_TD, y_TO, packed, batch)
    else:
        apply_kronecker_torch(x_TD, y_TO, packed, batch)


def apply_kronecker_torch(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """In place. Two GEMMs a slot and slice."""
    for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
        extras = packed.extras[slot]
        if extras is None or not extras.kroneckers:
            continue
        rows = batch.order_T[start:end]
        column = 0
        for part, ranges, size in zip(extras.kroneckers, packed.place.outputs, packed.place.sizes, strict=True):
            if part is not None:
                whole_TO = _product(x_TD[rows], part, packed.place.first_input)
                own_TO = torch.cat([whole_TO[:, own] for own in ranges], dim=1)
                y_TO[:, column : column + size].index_add_(0, rows, own_TO.to(y_TO.dtype))
            column += size


def _product(x_TD: Tensor, part: KroneckerPart, first_input: int) -> Tensor:
    """[T, O1 * O2], of the inputs that x has."""
    (o1, d1), (o2, d2) = part.w1.shape, part.w2.shape
    dtype = torch.promote_types(x_TD.dtype, part.w1.dtype)
    whole_TD = torch.zeros(len(x_TD), d1 * d2, dtype=dtype)
    whole_TD[:, first_input : first_input + x_TD.shape[1]] = x_TD
    inner = whole_TD.view(-1, d2) @ part.w2.to(dtype).T
    product = part.w1.to(dtype) @ inner.view(-1, d1, o2)
    return product.reshape(len(x_TD), o1 * o2).mul_(part.scale)

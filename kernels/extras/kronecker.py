"""Adapters that add a Kronecker product: y += scale * (w1 (x) w2) x, without computing the product itself.

Output o1 * O2 + o2 reads input d1 * D2 + d2, so x and y are matrices [D1, D2] and [O1, O2], and w1 @ x @ w2.T is added
to y. Each rank of a tensor-parallel group holds the whole w1 and w2. Its range of inputs or outputs is contiguous (for
fused projections there are a few ranges) and may begin within a row of that matrix. The rank treats the rest of x as
zeros and leaves the rest of y out.

For the Triton kernel, a slot's products on one packed linear are a record. For each slice it has int64 numbers: the
byte offsets of w1 and w2, O1, D1, O2, D2, the bits of the float32 scale, and 0. Offsets count from the record's own
address. O1 is 0 if the slice has no product.
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
    """The factors of one slice, whole on every rank and of one dtype."""

    w1: Tensor  # [O1, D1]
    w2: Tensor  # [O2, D2]
    scale: float


def apply_kronecker(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds each token's own product to y in place. Does nothing if no slot of the step has one."""
    if not batch.has_kronecker:
        return
    if x_TD.is_cuda:
        from lorafleet.kernels.extras.kronecker_triton import apply_kronecker_triton  # triton is optional on a CPU

        apply_kronecker_triton(x_TD, y_TO, packed, batch)
    else:
        apply_kronecker_torch(x_TD, y_TO, packed, batch)


def apply_kronecker_torch(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds the products to y in place, with two GEMMs for each slot and slice."""
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
    """Returns the product [T, O1 * O2] of the inputs that x has."""
    (o1, d1), (o2, d2) = part.w1.shape, part.w2.shape
    dtype = torch.promote_types(x_TD.dtype, part.w1.dtype)
    whole_TD = torch.zeros(len(x_TD), d1 * d2, dtype=dtype)
    whole_TD[:, first_input : first_input + x_TD.shape[1]] = x_TD
    inner = whole_TD.view(-1, d2) @ part.w2.to(dtype).T
    product = part.w1.to(dtype) @ inner.view(-1, d1, o2)
    return product.reshape(len(x_TD), o1 * o2).mul_(part.scale)

"""The entries to batched LoRA: a base linear with every token's own adapter, and the adapters' part alone."""

# T tokens · D in · O out

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.lora_torch import apply_lora_torch
from lorafleet.kernels.packed_lora import PackedLoRA


def linear_with_lora(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, packed: PackedLoRA, batch: LoRABatch
) -> Tensor:
    """x @ W.T + bias + scale * B[slot[t]] @ (A[slot[t]] @ x[t]); all contiguous."""
    if x_TD.is_cuda and packed.dtype in (None, x_TD.dtype):
        from lorafleet.kernels.lora_triton import linear_triton  # triton is optional on a CPU

        return linear_triton(x_TD, weight_OD, bias_O, packed, batch)
    y_TO = F.linear(x_TD, weight_OD, bias_O)
    apply_lora(x_TD, y_TO, packed, batch)
    return y_TO


def apply_lora(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += scale * B[slot[t]] @ (A[slot[t]] @ x[t]), in place.

    x and y are contiguous and of the base's dtype. Slots are trusted here, since checking would sync the GPU:
    LoRAModelManager.activate checks.
    """
    if packed.dtype in (None, x_TD.dtype):
        _apply(x_TD, y_TO, packed, batch)
        return
    # lora_dtype is another than the base's: as in PEFT, x is cast and the sum is of the base's dtype.
    delta_TO = y_TO.new_zeros(y_TO.shape, dtype=packed.dtype)
    _apply(x_TD.to(packed.dtype), delta_TO, packed, batch)
    y_TO += delta_TO


def _apply(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    if x_TD.is_cuda:
        from lorafleet.kernels.lora_triton import apply_lora_triton  # triton is optional on a CPU

        apply_lora_triton(x_TD, y_TO, packed, batch)
    else:
        apply_lora_torch(x_TD, y_TO, packed, batch)

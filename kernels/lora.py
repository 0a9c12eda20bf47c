"""The one entry to batched LoRA: adds every token's own adapter to a base linear's output."""

# T tokens · D in · O out

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.lora_torch import apply_lora_torch
from lorafleet.kernels.packed_lora import PackedLoRA


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

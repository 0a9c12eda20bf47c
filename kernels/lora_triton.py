"""Batched LoRA on the GPU: shrink, then expand, for one packed linear. kernels/lora_torch.py is its twin."""

# T tokens · D in · O out

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.lora_expand import expand
from lorafleet.kernels.lora_shrink import shrink
from lorafleet.kernels.packed_lora import PackedLoRA


def apply_lora_triton(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += scale * B[slot[t]] @ (A[slot[t]] @ x[t]) in place; launches nothing if no adapter has this linear."""
    if packed.max_total_rank(batch.slots) > 0:
        expand(shrink(x_TD, packed, batch), y_TO, packed, batch)

"""Batched LoRA on the GPU for one packed linear. kernels/lora_torch.py is its twin.

The shrink runs on a side stream beside the base GEMM, the expand adds in place. A captured CUDA graph keeps the fork
and the join.
"""

# T tokens · D in · O out

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.lora_expand import expand
from lorafleet.kernels.lora_shrink import shrink
from lorafleet.kernels.packed_lora import PackedLoRA


def apply_lora_triton(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += scale * B[slot[t]] @ (A[slot[t]] @ x[t]) in place; launches nothing if no adapter has this linear."""
    if _is_used(packed, batch):
        expand(shrink(x_TD, packed, batch), y_TO, packed, batch)


def linear_triton(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, packed: PackedLoRA, batch: LoRABatch
) -> Tensor:
    """x @ W.T + bias with each token's own adapter."""
    if not _is_used(packed, batch):
        return F.linear(x_TD, weight_OD, bias_O)
    side = batch.side_stream
    assert side is not None
    main = torch.cuda.current_stream(x_TD.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        p_KTC = shrink(x_TD, packed, batch)
    y_TO = F.linear(x_TD, weight_OD, bias_O)
    main.wait_stream(side)
    # No record_stream: each stream waits for the other before it reuses what was freed.
    expand(p_KTC, y_TO, packed, batch)
    return y_TO


def _is_used(packed: PackedLoRA, batch: LoRABatch) -> bool:
    """A static batch's launches must not depend on its content."""
    return batch.max_rank is not None or packed.max_total_rank(batch.slots) > 0

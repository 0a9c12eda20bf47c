"""Batched LoRA on the GPU for one packed linear. kernels/lora/lora_torch.py is its twin.

Decode: shrink and expand both run on a side stream beside the base GEMM, and whatever reads the GEMM's output next adds
their delta: nothing of them is left on the step's critical path but their bytes. A captured CUDA graph keeps the fork
and the join. Prefill: the GEMM, not memory, is the bottleneck and fills the GPU, so nothing runs beside it; the delta
is written first and the GEMM adds to it, which costs it nothing. The exchange between shrink and expand
(kernels/lora/lora_exchange.py) runs where they run; a delta of some columns only, where B is divided by output, is
added here. Kronecker products are added to the delta, where it has all columns, and so run beside the GEMM too.
Measured on an H200 by benchmarks/lora_kernels.py.
"""

# T tokens · D in · O out

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.extras.kronecker import apply_kronecker
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.lora_exchange import exchanged_splits
from lorafleet.kernels.lora.lora_expand import expand
from lorafleet.kernels.lora.lora_shrink import shrink
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight


def lora_delta_triton(
    x_TD: Tensor, packed: PackedLoRA, batch: LoRABatch, bias_O: Tensor | None = None
) -> Tensor | None:
    """scale * B[slot[t]] @ (A[slot[t]] @ x[t]) + bias, [T, O]; None, and no launch, if no adapter has this linear.

    O: of packed.out_features, and B this rank's.
    """
    if not _is_used(packed, batch):
        return None
    p_KTC = shrink(x_TD, packed, batch)
    if packed.layout.exchanges:
        p_KTC = exchanged_splits(p_KTC, packed.layout)
    return expand(p_KTC, packed, batch, x_TD.dtype, bias_O)


def linear_triton(
    x_TD: Tensor, weight: BaseWeight, bias_O: Tensor | None, packed: PackedLoRA, batch: LoRABatch
) -> tuple[Tensor, Tensor | None]:
    """x @ W.T + bias, and what the adapters add to it where that is not in it yet."""
    if not _is_used(packed, batch):
        y_TO = weight.linear(x_TD, bias_O)
        apply_kronecker(x_TD, y_TO, packed, batch)
        return y_TO, None
    is_whole = sum(packed.out_features) == weight.num_outputs
    if batch.is_prefill and is_whole:
        delta_TO = lora_delta_triton(x_TD, packed, batch, bias_O)
        assert delta_TO is not None
        apply_kronecker(x_TD, delta_TO, packed, batch)
        return weight.add_linear(delta_TO, x_TD), None
    side = batch.side_stream
    assert side is not None
    main = torch.cuda.current_stream(x_TD.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        delta_TO = lora_delta_triton(x_TD, packed, batch)
        assert delta_TO is not None
        if is_whole:
            apply_kronecker(x_TD, delta_TO, packed, batch)
    y_TO = weight.linear(x_TD, bias_O)
    main.wait_stream(side)
    # No record_stream: each stream waits for the other before it reuses what was freed.
    if is_whole:
        return y_TO, delta_TO
    packed.part_of(y_TO).add_(delta_TO)
    apply_kronecker(x_TD, y_TO, packed, batch)
    return y_TO, None


def _is_used(packed: PackedLoRA, batch: LoRABatch) -> bool:
    """A static batch's launches must not depend on its content, nor those that were compiled before a request came."""
    return batch.max_rank is not None or packed.max_total_rank(batch.slots) > 0

"""Batched LoRA on the GPU for one packed linear. kernels/lora/lora_torch.py is its twin.

Decode: shrink and expand both run on a side stream beside the base GEMM. The kernel that reads the GEMM's output next
adds their delta, so they add nothing to the step's critical path but their bytes. A captured CUDA graph contains the
fork and the join, and both streams' priorities. cuBLAS may leave SMs to the LoRA kernels: kernels/lora/sm_split.py.

Prefill: the GEMM is the bottleneck, not memory, and it fills the GPU. Nothing runs beside it: the delta is written
first, and the GEMM adds to it, which costs it nothing.

The exchange between shrink and expand (kernels/lora/lora_exchange.py) runs on the same stream as they do. If B is
divided by output, the delta has some columns only and is added here. Kronecker products are added to a delta that has
all columns, so they run beside the GEMM too. Measured on an H200 by benchmarks/lora_kernels.py.
"""

# T tokens · D in · O out

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.extras.kronecker import apply_kronecker
from lorafleet.kernels.lora.gemm_sms import gemms_limited_to
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.lora_exchange import exchanged_splits
from lorafleet.kernels.lora.lora_expand import expand
from lorafleet.kernels.lora.lora_shrink import shrink
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight


def lora_delta_triton(
    x_TD: Tensor, packed: PackedLoRA, batch: LoRABatch, bias_O: Tensor | None = None
) -> Tensor | None:
    """Returns scale * B[slot[t]] @ (A[slot[t]] @ x[t]) + bias as [T, O], where O counts the outputs of this rank's B.

    Returns None, without a launch, if no adapter has this linear.
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
    """Returns x @ W.T + bias, and what the adapters still have to add to it, or None if it contains that already."""
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
    gemm_sms = batch.split.gemm_sms
    # The delta takes the bias of a limited GEMM, since torch would leave a GEMM with a bias to cuBLASLt, which is not
    # limited.
    gemm_bias_O, delta_bias_O = (bias_O, None) if gemm_sms is None or not is_whole else (None, bias_O)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        delta_TO = lora_delta_triton(x_TD, packed, batch, delta_bias_O)
        assert delta_TO is not None
        if is_whole:
            apply_kronecker(x_TD, delta_TO, packed, batch)
    with gemms_limited_to(gemm_sms):
        y_TO = weight.linear(x_TD, gemm_bias_O)
    main.wait_stream(side)
    # record_stream is not needed: each stream waits for the other before it reuses freed memory.
    if is_whole:
        return y_TO, delta_TO
    packed.part_of(y_TO).add_(delta_TO)
    apply_kronecker(x_TD, y_TO, packed, batch)
    return y_TO, None


def _is_used(packed: PackedLoRA, batch: LoRABatch) -> bool:
    """Returns whether the LoRA kernels are launched.

    The launches of a static batch, and those compiled before any request comes, must not depend on the content.
    """
    return batch.max_rank is not None or packed.max_total_rank(batch.slots) > 0

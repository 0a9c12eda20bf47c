"""The entry points of batched adapters: a base linear with every token's own adapter, and A and B alone."""

# T tokens · D in · O out

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.extras.affine import apply_affine_torch
from lorafleet.kernels.extras.kronecker import apply_kronecker
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.lora_torch import apply_lora_torch
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight
from lorafleet.kernels.quant.fp8 import FP8


def linear_with_lora(
    x_TD: Tensor, weight: BaseWeight, bias_O: Tensor | None, packed: PackedLoRA, batch: LoRABatch
) -> LinearOutput:
    """Computes x @ W.T + bias + scale * B[slot[t]] @ (A[slot[t]] @ x[t]).

    The slot's Kronecker products are included, and so are its own scale and bias of the whole output
    (kernels/extras/affine.py). On a rank of a tensor-parallel group, W, A and B are the rank's parts: see
    kernels/lora/lora_layout.py. Its partial sums need the base's own all-reduce, applied to the value that the
    LinearOutput stands for.
    """
    if not x_TD.is_cuda:
        y_TO = weight.linear(x_TD, bias_O)
        apply_lora(x_TD, y_TO, packed, batch)
        apply_kronecker(x_TD, y_TO, packed, batch)
        apply_affine_torch(y_TO, packed, batch)
        return LinearOutput(y_TO)
    delta_TO = None
    if packed.dtype in (None, x_TD.dtype, FP8):
        from lorafleet.kernels.lora.lora_triton import linear_triton  # triton is optional on a CPU

        y_TO, delta_TO = linear_triton(x_TD, weight, bias_O, packed, batch)
    else:
        y_TO = weight.linear(x_TD, bias_O)
        apply_lora(x_TD, y_TO, packed, batch)
        apply_kronecker(x_TD, y_TO, packed, batch)
    return LinearOutput(y_TO, delta_TO, batch.addresses.affine(packed.index))


def apply_lora(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds scale * B[slot[t]] @ (A[slot[t]] @ x[t]) to y[t], in place.

    x and y are contiguous and of the base's dtype. Slots are not checked here, since checking would synchronize the
    GPU: LoRAModelManager.activate checks a slot before it is used.
    """
    cast_TD = _cast(x_TD, packed.dtype)
    if x_TD.is_cuda:
        from lorafleet.kernels.lora.lora_triton import lora_delta_triton  # triton is optional on a CPU

        delta_TO = lora_delta_triton(cast_TD, packed, batch)
        if delta_TO is not None:
            packed.part_of(y_TO).add_(delta_TO)
    elif cast_TD is x_TD:
        apply_lora_torch(x_TD, y_TO, packed, batch)
    else:
        delta_TO = cast_TD.new_zeros(y_TO.shape)
        apply_lora_torch(cast_TD, delta_TO, packed, batch)
        y_TO += delta_TO


def _cast(x_TD: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Casts x to the adapters' dtype, which may differ from the base's.

    As in PEFT, x is cast and the sum has the base's dtype. FP8 weights are an exception: the kernels convert them to
    x's dtype, and the torch twin computes in float32.
    """
    if dtype == FP8:
        dtype = None if x_TD.is_cuda else torch.float32
    return x_TD if dtype is None else x_TD.to(dtype)

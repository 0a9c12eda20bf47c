"""An adapter's own scale and bias of a linear's output: y = scale * (y + delta) + bias, with float32 vectors by token.

On a GPU, the kernel that reads the output applies them in the same pass: kernels/extras/affine_triton.py. It gets the
linear's two rows of ExtraTables.by_token: int64 [2, T], the addresses of each token's scale and bias, or 0 for none.
"""

# T tokens · O out

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import PackedLoRA


def apply_affine_torch(y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Applies the scales and biases to y in place. This is the CPU's serving path, where y contains delta already."""
    for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
        extras = packed.extras[slot]
        if extras is None or (extras.scale_O is None and extras.bias_O is None):
            continue
        rows = batch.order_T[start:end]
        own_TO = y_TO[rows].float()
        if extras.scale_O is not None:
            own_TO *= extras.scale_O
        if extras.bias_O is not None:
            own_TO += extras.bias_O
        y_TO[rows] = own_TO.to(y_TO.dtype)


def apply_affine(out: LinearOutput) -> Tensor:
    """Returns the sum of all parts of the output. Where y is computed already, it is added to in place.

    This is needed if a collective, or an operation of torch, comes between the linear and its reader.
    """
    y_TO, delta_TO, affine_2T, sums = out
    if sums is not None:
        from lorafleet.kernels.lora.split_sum_triton import split_sum_triton  # only GPUs have such sums

        return split_sum_triton(sums.part_KTO, y_TO.dtype, None)
    if affine_2T is None:
        return y_TO if delta_TO is None else y_TO.add_(delta_TO)
    from lorafleet.kernels.extras.affine_triton import apply_affine_triton  # only GPUs have such addresses

    return apply_affine_triton(out)

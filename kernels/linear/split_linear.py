"""Linears of the base in tuned shapes, for the CUDA graphs of decode steps without adapters.

At few rows a linear takes as long as reading W. A chain of them loses time at the borders between kernels: while one
ends, and until the next has its first bytes, memory is idle. So these kernels start before the one ahead has ended, and
the inputs of a tile are divided among programs, whose sums the reader adds. cuBLAS does neither: its kernels begin when
the one ahead has ended, and a kernel of their own adds the sums.

At more than MOST_SPLIT_ROWS rows cuBLAS wins, except for gate and up: a kernel that also multiplies SiLU(gate) by up
neither writes nor reads what lies between.

On CUDA this is kernels/linear/split_linear_triton.py, and wide_gated_triton.py for more rows.
kernels/linear/linear_tuning.py has the shapes.
"""

# T rows · D in · O out · I intermediate size

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.linear.linear_tuning import LinearShape
from lorafleet.kernels.lora.linear_output import LinearOutput


def split_linear(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None, shape: LinearShape) -> LinearOutput:
    """Returns x @ W.T + bias. On CUDA it is in float32 sums.

    All tensors are contiguous and of one dtype, and `shape` fits W and is not wide. T is at most MOST_SPLIT_ROWS.
    """
    if x_TD.is_cuda:
        from lorafleet.kernels.linear.split_linear_triton import split_linear_triton  # triton is optional on a CPU

        return split_linear_triton(x_TD, w_OD, bias_O, shape)
    return LinearOutput(F.linear(x_TD, w_OD, bias_O))


def gated_linear(x_TD: Tensor, w_OD: Tensor, shape: LinearShape) -> Tensor:
    """Returns SiLU(gate) * up [T, I], where the first half of W's rows computes gate and the second up.

    Nothing is rounded before the result. The arguments are as in split_linear, and shape.gated is true. If the shape is
    wide, T has no bound.
    """
    if x_TD.is_cuda and shape.is_wide:
        from lorafleet.kernels.linear.wide_gated_triton import wide_gated_triton

        return wide_gated_triton(x_TD, w_OD, shape)
    if x_TD.is_cuda:
        from lorafleet.kernels.linear.split_linear_triton import gated_linear_triton

        return gated_linear_triton(x_TD, w_OD, shape)
    return gated_mul(LinearOutput(F.linear(x_TD.float(), w_OD.float()))).to(x_TD.dtype)

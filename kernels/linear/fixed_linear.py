"""Linears of the base whose rows have the same bits in every batch, for --batch-invariant.

cuBLAS chooses its kernel, its tiles and the division of the inputs by the number of rows. Here the tiles depend on the
size of W alone, and one program walks all inputs of its outputs in order.
"""

# T rows · D in · O out

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.quant.base_weight import PlainWeight


def fixed_linear(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """Returns x @ W.T + bias, [T, O] in x's dtype. All tensors are contiguous and of one dtype.

    On a CPU, rows have fixed bits only if each call has one row.
    """
    if x_TD.is_cuda:
        from lorafleet.kernels.linear.fixed_linear_triton import fixed_linear_triton  # triton is optional on a CPU

        return fixed_linear_triton(x_TD, w_OD, bias_O)
    return F.linear(x_TD, w_OD, bias_O)


class FixedWeight(PlainWeight):
    """A plain weight whose products have fixed bits."""

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        return fixed_linear(x_TD.contiguous(), self.weight, bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        return y_TO.add_(self.linear(x_TD, None))

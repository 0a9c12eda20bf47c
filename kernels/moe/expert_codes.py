"""The quantized weights of all experts in one of a mixture's linears.

They are one quantized weight of kernels/quant, whose rows are those of the first expert, then those of the second, and
so on. So experts have the same codes, scales and values as dense linears, and are filled in the same way.

On a CPU the values of the chosen experts are computed when they are needed, one expert at a time. On a GPU the codes
are read by kernels/moe/moe_codes_cuda.py if tiled_weight() has a weight for them, and else by moe_codes_triton.py.
moe_triton.py has the values of some experts written for long prompts.
"""

# E experts · O out · D in

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.int_weight import IntScheme, IntWeight
from lorafleet.kernels.quant.nf4 import NF4Weight
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight, tiled_weight

MAX_FUSED = 2  # gate and up share a weight
# The values of codes of four bits are written for steps with more pairs of a token and an expert for each expert.
WRITTEN_PAIRS = 256
MOST_WRITTEN = 1 << 27  # of codes whose values are written at a time, unless one expert has more


class ExpertCodes(nn.Module):
    """The weights [E, O, D] of all experts, or this rank's part of them."""

    def __init__(self, scheme: Scheme, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.scheme = scheme
        self.shape = shape
        num_experts, outputs, inputs = shape
        if isinstance(scheme, IntScheme) and scheme.ordered_groups:
            scheme = replace(scheme, max_orders=MAX_FUSED * num_experts)
        # A product does not write values into the scratch memory, so that has a device that allocates nothing.
        unused = Scratch(dtype, torch.device("meta"))
        tiled = tiled_weight(scheme, outputs, inputs, dtype, device, unused, num_experts)
        weight = tiled or scheme.empty(num_experts * outputs, inputs, dtype, device, unused)
        assert isinstance(weight, (TiledWeight, ScaledWeight, NF4Weight, IntWeight))
        self.weight = weight  # its rows are those of all experts

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def __getitem__(self, expert: int) -> Tensor:
        """Returns the values of one expert's weight, [O, D] in the served dtype."""
        return self.values(expert, expert + 1)[0]

    def values(self, first: int, end: int) -> Tensor:
        """Returns the values of the experts from first to end, [end - first, O, D] in the served dtype."""
        _, outputs, inputs = self.shape
        return self.weight.dequantized(slice(first * outputs, end * outputs)).view(-1, outputs, inputs)


def written_experts(shape: tuple[int, int, int]) -> int:
    """Returns how many experts of a weight [E, O, D] have their values written at a time."""
    num_experts, outputs, inputs = shape
    return min(num_experts, max(1, MOST_WRITTEN // (outputs * inputs)))


ExpertMatrix = Tensor | ExpertCodes  # The weights [E, O, D] of all experts, plain or quantized.


def is_tiled(matrix: ExpertMatrix) -> bool:
    """Returns whether the CUDA kernels for codes of four bits read the weights."""
    return isinstance(matrix, ExpertCodes) and isinstance(matrix.weight, TiledWeight)

"""The building blocks of the decoder: norms, and the packed linear with its adapters.

Parameters are created empty here. workers/bases/weights.py fills them.
"""

# T tokens · D in · O out

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.norm_slots import NormSlots
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight
from lorafleet.workers.tp.row_parallel_sum import RankSum


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """A norm whose weight adapters may replace. `dtype` is the weight's, ModelConfig.norm_dtype.

    slots has the adapters' own weights. It is None until adapters are enabled.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self.slots: NormSlots | None = None

    def for_step(self, batch: LoRABatch | None) -> NormWeight:
        """Returns the weight, with the own weights of the step's tokens."""
        if batch is None or self.slots is None:
            return NormWeight(self.weight)
        return self.slots.for_step(self.weight, batch)


class ResidualNorm(RMSNorm):
    """The norm behind a row-parallel linear or the embedding, whose output is a sum over the ranks."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, ranks: RankSum) -> None:
        super().__init__(size, eps, dtype, device)
        self._ranks = ranks

    def start(self, x: Tensor, batch: LoRABatch | None) -> tuple[Tensor, Tensor]:
        """Returns the residual, which is the ranks' sum of x, and its norm."""
        return self._ranks.rms_norm(x, self.for_step(batch), self.eps)

    def add(self, x: LinearOutput, residual: Tensor, batch: LoRABatch | None, branch: RMSNorm | None = None) -> Tensor:
        """Adds the ranks' sum of x to the residual, in place, and returns its norm. `branch` norms the sum before it
        is added."""
        branch_weight = None if branch is None else branch.for_step(batch)
        return self._ranks.add_rms_norm(x, residual, self.for_step(batch), self.eps, branch_weight)


class PackedLinear(nn.Module):
    """One GEMM for several projections that share an input (q, k, v or gate, up), or for one.

    Sizes are this rank's. adds_bias is False if the output is a sum over the ranks and another rank adds the bias.
    lora is None until adapters are enabled.
    """

    weight: BaseWeight  # set by whoever builds the model; may be quantized

    def __init__(
        self,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = parameter(sum(out_features), dtype=dtype, device=device) if bias else None
        self.lora: PackedLoRA | None = None
        self.adds_bias = adds_bias

    def forward(self, x_TD: Tensor, batch: LoRABatch | None) -> LinearOutput:
        if batch is not None and self.lora is not None:
            return linear_with_lora(x_TD, self.weight, self.added_bias, self.lora, batch)
        return LinearOutput(self.weight.linear(x_TD, self.added_bias))

    @property
    def added_bias(self) -> Tensor | None:
        """The bias that forward() adds on this rank, or None."""
        return self.bias if self.adds_bias else None

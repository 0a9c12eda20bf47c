"""The building blocks of the decoder: norms, and the packed linear with its adapters.

Parameters are created empty here. workers/bases/weights.py fills them.
"""

# T tokens · D in · O out

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm, rms_norm
from lorafleet.kernels.linear.linear_tuning import LinearShape
from lorafleet.kernels.linear.split_linear import split_linear
from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.norm_slots import NormSlots
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.bases.projection import Projection
from lorafleet.workers.tp.row_parallel_sum import RankSum


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Norm(nn.Module):
    """An RMS norm or a layer norm, whose weight adapters may replace. `dtype` is the weight's, ModelConfig.norm_dtype.

    slots has the adapters' own weights. It is None until adapters are enabled.
    """

    def __init__(self, size: int, style: NormStyle, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        if not style.has_weight:
            self.weight.fill_(1.0)
        self.bias = parameter(size, dtype=dtype, device=device) if style.has_bias else None
        self.style = style
        self.slots: NormSlots | None = None

    @property
    def eps(self) -> float:
        return self.style.eps

    def for_step(self, batch: LoRABatch | None) -> NormWeight:
        """Returns the weight, with the own weights of the step's tokens."""
        if batch is None or self.slots is None:
            weight = NormWeight(self.weight)
        else:
            weight = self.slots.for_step(self.weight, batch)
        return weight._replace(is_centered=self.style.kind == "layer", bias_D=self.bias)


class ResidualSum(nn.Module):
    """The place behind a row-parallel linear or the embedding, whose output is a sum over the ranks.

    norm is the norm of the residual there. It is None if the residual itself is read.
    """

    def __init__(self, norm: Norm | None, scale: float, eps: float, ranks: RankSum) -> None:
        super().__init__()
        self.norm = norm
        self._scale = scale
        self._eps = eps
        self._ranks = ranks

    def start(self, x: Tensor, batch: LoRABatch | None) -> tuple[Tensor, Tensor]:
        """Returns the residual, which is the ranks' sum of x, and its norm."""
        return self._ranks.rms_norm(x, self._weight(batch), self._eps)

    def add(self, x: LinearOutput, residual: Tensor, batch: LoRABatch | None, branch: Norm | None = None) -> Tensor:
        """Adds the ranks' scaled sum of x to the residual, in place, and returns its norm. `branch` norms the sum
        before it is added."""
        branch_weight = None if branch is None else branch.for_step(batch)
        return self._ranks.add_rms_norm(x, residual, self._weight(batch), self._eps, branch_weight, self._scale)

    def add_whole(self, x: Tensor, residual: Tensor, batch: LoRABatch | None, branch: Norm | None = None) -> Tensor:
        """Does what add() does, for an x that is the same on all ranks."""
        branch_weight = None if branch is None else branch.for_step(batch)
        return add_rms_norm(LinearOutput(x), residual, self._weight(batch), self._eps, branch_weight, self._scale)

    def read(self, residual: Tensor, batch: LoRABatch | None) -> Tensor:
        """Returns the residual's norm. Nothing is added."""
        weight = self._weight(batch)
        return residual if weight is None else rms_norm(residual, weight, self._eps)

    def _weight(self, batch: LoRABatch | None) -> NormWeight | None:
        return None if self.norm is None else self.norm.for_step(batch)


class PackedLinear(nn.Module):
    """One GEMM for several projections that share an input (q, k, v or gate, up), or for one.

    Sizes are this rank's. adds_bias is False if the output is a sum over the ranks and another rank adds the bias.
    lora is None until adapters are enabled. shape is set while workers/step/own_linears.py captures a step without
    adapters. It is None if cuBLAS, or a quantized weight's own kernel, computes the base. A wide one is only for gated
    MLPs, which compute their first linear themselves.
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
        self.dtype = dtype
        self.bias = parameter(sum(out_features), dtype=dtype, device=device) if bias else None
        self.lora: PackedLoRA | None = None
        self.shape: LinearShape | None = None
        self.adds_bias = adds_bias

    @classmethod
    def of(
        cls, projections: Sequence[Projection], dtype: torch.dtype, device: torch.device, adds_bias: bool = True
    ) -> PackedLinear:
        """Returns the linear that computes these projections, which have this rank's sizes."""
        first = projections[0]
        outputs = tuple(projection.num_outputs for projection in projections)
        return cls(first.inputs.total, outputs, first.has_bias, dtype, device, adds_bias)

    def forward(self, x_TD: Tensor, batch: LoRABatch | None) -> LinearOutput:
        if batch is not None and self.lora is not None:
            return linear_with_lora(x_TD, self.weight, self.added_bias, self.lora, batch)
        if self.shape is not None and not self.shape.is_wide:
            return split_linear(x_TD, self.weight.dequantized(), self.added_bias, self.shape)
        return LinearOutput(self.weight.linear(x_TD, self.added_bias))

    @property
    def added_bias(self) -> Tensor | None:
        """The bias that forward() adds on this rank, or None."""
        return self.bias if self.adds_bias else None

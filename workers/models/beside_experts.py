"""A mixture of experts that stands beside a layer's dense MLP, each with norms of its own before and behind it.

Both are summed over the ranks separately, since a norm follows each. Joining the two collectives, and the norms of one
residual, would save launches.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.rms_norm import NormWeight, rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.experts_config import BesideMLP, ExpertsConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.models.layers import Norm, parameter
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.tp.group import TPGroup


class BesideExperts(nn.Module):
    """The mixture, its norms, and the norm behind the dense MLP. `model` and `experts` have this rank's sizes."""

    def __init__(
        self,
        model: ModelConfig,
        experts: ExpertsConfig,
        beside: BesideMLP,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group = group
        self._names = beside
        self._router_factor = model.hidden_size**-0.5
        self.mixture = SparseMLP(model.hidden_size, experts, dtype, device, adds_bias=group.rank == 0)
        self.router_scale_D = parameter(model.hidden_size, dtype=dtype, device=device)
        self.dense_out_norm, self.in_norm, self.out_norm = (
            Norm(model.hidden_size, model.norm, model.norm_dtype(dtype), device) for _ in range(3)
        )

    def forward(self, dense: LinearOutput, residual_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the sum of both, [T, D], the same on all ranks.

        `dense` is the dense MLP's output on this rank, and the residual is what it was before that.
        """
        eps = self.in_norm.eps
        router_x_TD = rms_norm(residual_TD, NormWeight(self.router_scale_D), eps) * self._router_factor
        x_TD = rms_norm(residual_TD, self.in_norm.for_step(lora), eps)
        sparse_TD = self._summed(self.mixture(x_TD, lora, router_x_TD))
        dense_TD = rms_norm(self._summed(dense), self.dense_out_norm.for_step(lora), eps)
        return dense_TD.add_(rms_norm(sparse_TD, self.out_norm.for_step(lora), eps))

    def norms(self) -> dict[str, Norm]:
        """Returns the norms by their names below the layer."""
        named = self._names
        return {
            named.dense_out_norm: self.dense_out_norm,
            named.in_norm: self.in_norm,
            named.out_norm: self.out_norm,
        }

    def vectors(self) -> dict[str, Tensor]:
        """Returns the parameters that are neither of a norm nor of the mixture, by their names below the layer."""
        return {self._names.router_scale: self.router_scale_D}

    def _summed(self, x: LinearOutput) -> Tensor:
        return self._group.all_reduce(apply_affine(x))

"""Computes a layer with Mamba-2's state space behind a short convolution, alone or in parallel with attention.

Under tensor parallelism each rank has some heads, with the groups that they belong to and their states. If there are
fewer groups than ranks, several ranks compute the same k and q, and the norm of a group is over the heads of several.
"""

# T tokens · D hidden size · C channels of the convolution: x, k, q · K its taps · H heads · G groups
# V numbers of a head · W numbers of a group's heads · N outputs of the first linear · I numbers of all heads

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.recurrent.causal_conv import causal_conv
from lorafleet.kernels.recurrent.gated_norm import gated_norm
from lorafleet.kernels.recurrent.state_space import HeadSteps, state_space
from lorafleet.workers.bases.layer_config import ParallelMixerConfig
from lorafleet.workers.bases.recurrence_config import Mamba2Config
from lorafleet.workers.models.attention import Attention, StepContext
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


class Mamba2(nn.Module):
    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, config = shard.local, shard.local.layers[layer].recurrence
        whole = shard.whole.layers[layer].recurrence
        assert isinstance(config, Mamba2Config) and isinstance(whole, Mamba2Config)
        self.config = config
        self.index = model.recurrent_layers.index(layer)
        in_projections, out_projections = config.packed(model.hidden_size)
        self.in_proj = PackedLinear.of(in_projections, dtype, device)
        self.out_proj = PackedLinear.of(out_projections, dtype, device, adds_bias=group.rank == 0)
        self.conv_CK = parameter(config.num_channels, config.conv_size, dtype=dtype, device=device)
        self.conv_bias_C = parameter(config.num_channels, dtype=dtype, device=device) if config.conv_bias else None
        self.a_log_H, self.dt_bias_H, self.d_H = (
            parameter(config.num_heads, dtype=torch.float32, device=device) for _ in range(3)
        )
        # None if there is no norm
        self.norm_GW: nn.Parameter | None = None
        self._group_norm: GroupNorm | None = None
        if config.norm is not None:
            size = config.inner.total // config.num_groups
            self.norm_GW = parameter(config.num_groups, size, dtype=dtype, device=device)
            self._group_norm = GroupNorm(whole, model.norm.eps, group)
        scales = [
            torch.full((units.total,), scale)
            for units, scale in zip(config.in_units, config.multipliers.of_parts, strict=True)
        ]
        has_scales = any(scale != 1.0 for scale in config.multipliers.of_parts)
        self._scales_N = torch.cat(scales).to(device, dtype) if has_scales else None

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        assert step.states is not None, "a model with recurrent layers needs their states"
        config, states, batch = self.config, step.states.layers[self.index], step.states.batch
        if config.multipliers.x_in != 1.0:
            x_TD = x_TD * config.multipliers.x_in
        parts_TN = apply_affine(self.in_proj(x_TD, step.lora))
        if self._scales_N is not None:
            parts_TN *= self._scales_N
        gate_TI, xkq_TC, dt_TH = parts_TN.split((config.inner.total, config.num_channels, config.num_heads), dim=1)
        mixed_TC = causal_conv(xkq_TC, self.conv_CK, states.conv_SCJ, batch, self.conv_bias_C)
        steps = HeadSteps(dt_TH, self.a_log_H, self.dt_bias_H, self.d_H, config.dt_limits)
        out_THV = state_space(mixed_TC, steps, states.memory_SHKV, config.num_groups, batch)
        if self._group_norm is None or self.norm_GW is None:
            gated_TI = F.silu(gate_TI).mul_(out_THV.flatten(1))
        else:
            groups = config.num_groups, -1
            x_TGW, gate_TGW = out_THV.flatten(1).unflatten(1, groups), gate_TI.unflatten(1, groups)
            gated_TI = self._group_norm(x_TGW, gate_TGW, self.norm_GW).flatten(1)
        out: LinearOutput = self.out_proj(gated_TI, step.lora)
        return out

    def norms(self) -> dict[str, Norm]:
        """Returns no norms, since adapters cannot replace the gated norm."""
        return {}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of Mamba2Config.packed."""
        return [self.in_proj, self.out_proj]


class GroupNorm:
    """The gated norm of each group's heads. The ranks that have heads of one group exchange sums of squares."""

    def __init__(self, whole: Mamba2Config, eps: float, group: TPGroup) -> None:
        """Takes the description of the layer on all ranks."""
        self._gates_first = whole.norm == "gated"
        self._eps = eps
        self._group = group
        self._num_groups = whole.num_groups
        self._size = whole.inner.total // whole.num_groups

    def __call__(self, x_TGW: Tensor, gate_TGW: Tensor, weight_GW: Tensor) -> Tensor:
        if self._num_groups >= self._group.size:
            return gated_norm(x_TGW, gate_TGW, weight_GW, self._eps, self._gates_first)
        own = self._group.rank * self._num_groups // self._group.size  # this rank's only group
        x32_TGW, gate_TGW = x_TGW.float(), F.silu(gate_TGW.float())
        if self._gates_first:
            x32_TGW = x32_TGW * gate_TGW
        squares_TG = x32_TGW.new_zeros(len(x_TGW), self._num_groups)
        squares_TG[:, own] = x32_TGW.square().sum(dim=(1, 2))
        mean_T = self._group.all_reduce(squares_TG)[:, own] / self._size
        normed_TGW = x32_TGW * torch.rsqrt(mean_T + self._eps)[:, None, None] * weight_GW.float()
        return (normed_TGW if self._gates_first else normed_TGW * gate_TGW).to(x_TGW.dtype)


class ParallelMixer(nn.Module):
    """Attention and a state space that read the same norm's output. Their results are added, as in Falcon-H1."""

    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        config = shard.local.layers[layer].mixer
        assert isinstance(config, ParallelMixerConfig)
        self.config = config
        self.attention = Attention(shard, layer, group, dtype, device)
        self.mamba = Mamba2(shard, layer, group, dtype, device)

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        config = self.config
        attended_TD = apply_affine(self.attention(_scaled(x_TD, config.attention_in), step))
        mixed_TD = apply_affine(self.mamba(x_TD, step))
        return LinearOutput(_scaled(attended_TD, config.attention_out) + _scaled(mixed_TD, config.mamba_out))

    def norms(self) -> dict[str, Norm]:
        """Returns the attention's norms by their module paths below the layer."""
        return self.attention.norms()

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of ParallelMixerConfig.packed."""
        return [*self.attention.packed_linears(), *self.mamba.packed_linears()]


def _scaled(x_TD: Tensor, factor: float) -> Tensor:
    return x_TD if factor == 1.0 else x_TD * factor

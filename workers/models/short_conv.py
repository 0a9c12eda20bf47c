"""Computes a layer with a short convolution between two gates, in place of attention, as in LFM2.

Under tensor parallelism each rank has some channels.
"""

# T tokens · D hidden size · C channels · K taps of the convolution

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.recurrent.causal_conv import causal_conv
from lorafleet.workers.bases.recurrence_config import ShortConvConfig
from lorafleet.workers.models.attention import StepContext
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


class ShortConv(nn.Module):
    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, config = shard.local, shard.local.layers[layer].recurrence
        assert isinstance(config, ShortConvConfig)
        self.index = model.recurrent_layers.index(layer)
        in_projections, out_projections = config.packed(model.hidden_size)
        self.in_proj = PackedLinear.of(in_projections, dtype, device)
        self.out_proj = PackedLinear.of(out_projections, dtype, device, adds_bias=group.rank == 0)
        self.conv_CK = parameter(config.num_channels, config.conv_size, dtype=dtype, device=device)
        self.conv_bias_C = parameter(config.num_channels, dtype=dtype, device=device) if config.has_bias else None

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        assert step.states is not None, "a model with recurrent layers needs their states"
        conv_SCJ, batch = step.states.layers[self.index].conv_SCJ, step.states.batch
        gate_in_TC, gate_out_TC, inner_TC = apply_affine(self.in_proj(x_TD, step.lora)).chunk(3, dim=1)
        gated_TC = gate_in_TC * inner_TC
        mixed_TC = causal_conv(gated_TC, self.conv_CK, conv_SCJ, batch, self.conv_bias_C, activates=False)
        out: LinearOutput = self.out_proj(mixed_TC.mul_(gate_out_TC), step.lora)
        return out

    def norms(self) -> dict[str, Norm]:
        """Returns no norms, since there are none."""
        return {}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of ShortConvConfig.packed."""
        return [self.in_proj, self.out_proj]

"""Computes a recurrent layer: a gated delta rule behind a short convolution, in place of attention, as in Qwen3-Next.

Under tensor parallelism each rank has some key heads, with the value heads that they serve and their states.
"""

# T tokens · D hidden size · C channels of the convolution: queries, keys, values · K its taps · H value heads
# V numbers of a value · N outputs of a linear

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.kernels.recurrent.causal_conv import causal_conv
from lorafleet.kernels.recurrent.delta_rule import HeadGates, gated_delta_rule
from lorafleet.kernels.recurrent.delta_step import (
    MOST_TOKENS,
    DeltaColumns,
    DeltaWeights,
    HeadColumns,
    delta_step,
)
from lorafleet.kernels.recurrent.gated_norm import gated_norm
from lorafleet.workers.bases.layer_config import DeltaNetConfig
from lorafleet.workers.models.attention import StepContext
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


class DeltaNet(nn.Module):
    """A layer with a gated delta rule. few_tokens is set while workers/step/few_token_kernels.py captures a step that
    delta_step() computes."""

    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, config = shard.local, shard.local.layers[layer].mixer
        assert isinstance(config, DeltaNetConfig)
        self.config = config
        self.index = model.recurrent_layers.index(layer)
        self.eps = model.norm.eps if config.norm_eps is None else config.norm_eps
        first, second, [out] = config.packed(model.hidden_size)
        self.first_in_proj = PackedLinear.of(first, dtype, device)
        self.second_in_proj = PackedLinear.of(second, dtype, device)
        self.out_proj = PackedLinear.of([out], dtype, device, adds_bias=group.rank == 0)
        self.conv_CK = parameter(config.num_channels, config.conv_size, dtype=dtype, device=device)
        self.a_log_H, self.dt_bias_H = (
            parameter(config.num_v_heads, dtype=torch.float32, device=device) for _ in range(2)
        )
        self.norm_V = parameter(config.v_dim, dtype=dtype, device=device)
        self.few_tokens: DeltaWeights | None = None

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        assert step.states is not None, "a model with recurrent layers needs their states"
        if self.few_tokens is not None:
            return self._of_few_tokens(x_TD, step, self.few_tokens)
        states, batch = step.states.layers[self.index], step.states.batch
        qkv_TC, gate_THV, b_TH, a_TH = self._projected(x_TD, step.lora)
        mixed_TC = causal_conv(qkv_TC, self.conv_CK, states.conv_SCJ, batch)
        gates = HeadGates(b_TH, a_TH, self.a_log_H, self.dt_bias_H, self.config.beta_scale)
        out_THV = gated_delta_rule(mixed_TC, gates, states.memory_SHKV, self.config.num_k_heads, batch)
        normed_THV = gated_norm(out_THV, gate_THV, self.norm_V, self.eps)
        out: LinearOutput = self.out_proj(normed_THV.flatten(1), step.lora)
        return out

    def _projected(self, x_TD: Tensor, lora: LoRABatch | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the convolution's input [T, C], the gates of the results [T, H, V], b and a [T, H]."""
        config = self.config
        first_TN, second_TN = (apply_affine(proj(x_TD, lora)) for proj in (self.first_in_proj, self.second_in_proj))
        values = config.num_v_heads * config.v_dim
        if config.layout == "apart":
            gate_TN, b_TH, a_TH = second_TN.split((values, config.num_v_heads, config.num_v_heads), dim=1)
            return first_TN, gate_TN.unflatten(1, (config.num_v_heads, -1)), b_TH, a_TH
        if config.layout == "split":
            qkv_TC, gate_TN = first_TN.split((config.num_channels, values), dim=1)
            b_TH, a_TH = second_TN.chunk(2, dim=1)
            return qkv_TC, gate_TN.unflatten(1, (config.num_v_heads, -1)), b_TH, a_TH
        ratio, groups = config.v_heads_per_k_head, config.num_k_heads
        sizes = config.k_dim, config.k_dim, ratio * config.v_dim, ratio * config.v_dim
        q_TGN, k_TGN, v_TGN, gate_TGN = first_TN.unflatten(1, (groups, -1)).split(sizes, dim=2)
        b_TGN, a_TGN = second_TN.unflatten(1, (groups, -1)).split((ratio, ratio), dim=2)
        qkv_TC = torch.cat((q_TGN.flatten(1), k_TGN.flatten(1), v_TGN.flatten(1)), dim=1)
        gate_THV = gate_TGN.reshape(len(x_TD), config.num_v_heads, config.v_dim)
        return qkv_TC, gate_THV, b_TGN.flatten(1), a_TGN.flatten(1)

    def _of_few_tokens(self, x_TD: Tensor, step: StepContext, weights: DeltaWeights) -> LinearOutput:
        assert step.states is not None and step.lora is None
        states, first = step.states.layers[self.index], self.first_in_proj(x_TD, None)
        out_THV = delta_step(first, x_TD, weights, states.conv_SCJ, states.memory_SHKV, step.states.batch)
        out: LinearOutput = self.out_proj(out_THV.flatten(1), None)
        return out

    def for_few_tokens(self, early: bool) -> DeltaWeights | None:
        """Returns what delta_step() reads, or None if it does not compute such a layer."""
        config, second = self.config, self.second_in_proj.weight
        # The kernel reads a plain weight, and a FixedWeight's bits must not change.
        if type(second) is not PlainWeight or self.second_in_proj.bias is not None or config.layout == "apart":
            return None
        return DeltaWeights(
            second.dequantized(),
            _columns(config),
            config.num_k_heads,
            self.conv_CK.data,
            self.a_log_H.data,
            self.dt_bias_H.data,
            config.beta_scale,
            self.norm_V.data,
            self.eps,
            self._arrived_TG,
            early,
        )

    @cached_property
    def _arrived_TG(self) -> Tensor:
        return torch.zeros(MOST_TOKENS, self.config.num_k_heads, dtype=torch.int32, device=self.conv_CK.device)

    def norms(self) -> dict[str, Norm]:
        """Returns no norms, since adapters cannot replace the gated norm."""
        return {}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of DeltaNetConfig.packed."""
        return [self.first_in_proj, self.second_in_proj, self.out_proj]


def _columns(config: DeltaNetConfig) -> DeltaColumns:
    """Returns where the two input linears have their outputs, which _projected() takes apart."""
    ratio, keys = config.v_heads_per_k_head, config.num_k_heads * config.k_dim
    k_dim, own = config.k_dim, ratio * config.v_dim
    if config.layout == "grouped":
        width = 2 * k_dim + 2 * own
        return DeltaColumns(
            HeadColumns(0, width),
            HeadColumns(k_dim, width),
            HeadColumns(2 * k_dim, width),
            HeadColumns(2 * k_dim + own, width),
            HeadColumns(0, 2 * ratio),
            HeadColumns(ratio, 2 * ratio),
        )
    assert config.layout == "split"
    return DeltaColumns(
        HeadColumns(0, k_dim),
        HeadColumns(keys, k_dim),
        HeadColumns(2 * keys, own),
        HeadColumns(config.num_channels, own),
        HeadColumns(0, ratio),
        HeadColumns(config.num_v_heads, ratio),
    )

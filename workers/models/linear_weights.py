"""Creates the weights of linears and of experts, empty, in the form in which the model holds them."""

# E experts · O out · D in

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.moe.expert_codes import ExpertCodes, ExpertMatrix
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight, Scheme
from lorafleet.kernels.quant.tiled_weight import empty_weight
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.linear_schemes import experts_scheme, linear_scheme
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.models.layers import PackedLinear
from lorafleet.workers.models.sparse_mlp import SparseMLP


class LinearWeights:
    """Creates the weights of one model's linears."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._scratch = Scratch(dtype, device)

    def empty(self, scheme: Scheme | None, outputs: int, inputs: int, dtype: torch.dtype) -> BaseWeight:
        """Returns an empty weight of this rank's sizes. `dtype` is that of an unquantized weight.

        Raises UnsupportedModel if it cannot be quantized this way.
        """
        if scheme is None:
            return PlainWeight.empty(outputs, inputs, dtype, self._device)
        if refusal := scheme.refusal(inputs):
            raise UnsupportedModel(refusal, "quantization")
        return empty_weight(scheme, outputs, inputs, self._dtype, self._device, self._scratch)

    def experts(self, scheme: Scheme | None, shape: tuple[int, int, int]) -> ExpertMatrix:
        """Returns the empty weights [E, O, D] of all experts, of this rank's sizes.

        Raises UnsupportedModel if they cannot be quantized this way.
        """
        if scheme is None:
            return nn.Parameter(torch.empty(shape, dtype=self._dtype, device=self._device), requires_grad=False)
        if refusal := scheme.refusal(shape[2]):
            raise UnsupportedModel(refusal, "quantization")
        return ExpertCodes(scheme, shape, self._dtype, self._device)


def hold_weights(
    config: ModelConfig,
    linears: Iterable[tuple[tuple[str, ...], PackedLinear]],
    mixtures: Iterable[tuple[str, SparseMLP]],
    weights: LinearWeights,
) -> None:
    """Gives the linears and mixtures of a model their empty weights. The names are module paths below the model."""
    for names, linear in linears:
        scheme = linear_scheme(config, names)
        linear.weight = weights.empty(scheme, sum(linear.out_features), linear.in_features, linear.dtype)
    for name, mixture in mixtures:
        gate_up = weights.experts(experts_scheme(config, name, mixture.experts.first_leaves), mixture.gate_up_shape)
        mixture.hold(gate_up, weights.experts(experts_scheme(config, name, ["down_proj"]), mixture.down_shape))

"""Creates the linears' weights, empty, in the form in which the model holds them."""

from __future__ import annotations

import torch

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight
from lorafleet.kernels.quant.fp8_weight import FP8Weight
from lorafleet.kernels.quant.nf4 import NF4Weight
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.protocol.quantization_methods import Method


class LinearWeights:
    """Creates the weights of one model's linears."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._scratch = Scratch(dtype, device)

    def empty(self, method: Method | None, outputs: int, inputs: int) -> BaseWeight:
        """Returns an empty weight of this rank's sizes. Raises UnsupportedModel if it cannot be quantized this way."""
        if method is None:
            return PlainWeight.empty(outputs, inputs, self._dtype, self._device)
        if method == "fp8":
            return FP8Weight(outputs, inputs, self._dtype, self._device)
        if inputs % 2:
            raise UnsupportedModel(
                f"a linear with {inputs} inputs on each rank cannot be quantized to nf4, which needs an even number. "
                "Use quantization=fp8, or another tensor_parallel_size.",
                "quantization",
            )
        return NF4Weight(outputs, inputs, self._dtype, self._device, self._scratch)

"""Chooses the kernels of the base's linears for captured decode steps without adapters.

cuBLAS computes a linear unless the GPU's tuned data has a shape for its size and the step's number of rows
(kernels/linear/linear_tuning.py). The choice holds while a step is captured. All other steps use cuBLAS, so that no
request waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lorafleet.kernels.linear.linear_tuning import LinearShape, linear_shape
from lorafleet.kernels.moe.few_tokens import FewTokenMixture
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.engine_model import EngineModel

# Returns the shape for a device, a dtype, the numbers of outputs and of inputs, and the number of rows.
ShapeOf = Callable[[torch.device, torch.dtype, int, int, int], LinearShape | None]


@contextmanager
def own_linears(model: EngineModel, num_rows: int, shape_of: ShapeOf = linear_shape) -> Iterator[int]:
    """Sets the shapes of the model's linears in the block, and yields how many have one.

    Quantized linears have kernels of their own. A tensor-parallel rank's linears are left to cuBLAS too, and those of a
    model with mixtures of experts unless few_token_mixture() computes the mixtures: other kernels read their outputs,
    which would add the sums in a launch more.
    """
    chosen = []
    suits = all(isinstance(mixture.few_tokens, FewTokenMixture) for _, mixture in model.mixtures())
    if isinstance(model, DecoderModel) and model.shard.size == 1 and suits:
        for _, linear in model.packed_linears():
            if type(linear.weight) is PlainWeight:  # and not a FixedWeight, whose bits must not change
                w_OD = linear.weight.dequantized()
                outputs, inputs = w_OD.shape
                linear.shape = shape_of(w_OD.device, w_OD.dtype, outputs, inputs, num_rows)
                chosen.append(linear)
    try:
        yield sum(linear.shape is not None for linear in chosen)
    finally:
        for linear in chosen:
            linear.shape = None

"""The kinds of numbers of compressed-tensors that have scales and no zero points: FP8, int8, NVFP4 and MXFP4.

Activations are not rounded as input_activations says. Only FP8 with one scale for each row or tensor rounds x, by
token, where the GPU multiplies e4m3 by e4m3. Scales for x in the files are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.e2m1 import MX_GROUP, NV_GROUP
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.formats.float_codes import (
    BY_ROW,
    BY_TENSOR,
    Block,
    mxfp4_matrix,
    nvfp4_matrix,
    scaled_matrix,
)

INPUT_BITS = (4, 8, 16)  # of activations that a scheme may round


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """The scheme of a group of linears, and the function that reads one of them."""

    scheme: Scheme
    matrix: Callable[[LinearTensors], QuantizedMatrix]


def stored_numbers(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> StoredNumbers | None:
    """Returns how the numbers are stored that config.json describes, or None if they are of another kind.

    `weights` and `inputs` are the group's `weights` and `input_activations`. pack-quantized stores integers otherwise.
    """
    if weights.get("dynamic") or not weights.get("symmetric", True) or weights.get("actorder"):
        return None
    kind = weights.get("type"), weights.get("num_bits")
    if kind == ("float", 4):
        return _four_bits(weights)
    block = _block(weights)
    if block is None:
        return None
    if kind == ("float", 8):
        rounds_x = inputs.get("type") == "float" and inputs.get("num_bits") == 8
        scheme = ScaledScheme(block=block[1], rounds_x=rounds_x)
        return StoredNumbers(scheme, lambda linear: scaled_matrix(linear, FP8, block, "weight_scale"))
    if kind in (("int", 4), ("int", 8)):  # outside of pack-quantized, four bits are stored in a byte each
        scheme = ScaledScheme("int8", torch.int8, block[1], rounds_x=False)
        return StoredNumbers(scheme, lambda linear: scaled_matrix(linear, torch.int8, block, "weight_scale"))
    return None


def _four_bits(weights: Mapping[str, Any]) -> StoredNumbers | None:
    strategy = weights.get("strategy"), weights.get("group_size")
    if strategy == ("tensor_group", NV_GROUP):
        names = "weight_packed", "weight_scale", "weight_global_scale"
        return StoredNumbers(NVFP4, lambda linear: nvfp4_matrix(linear, *names, second_divides=True))
    if strategy == ("group", MX_GROUP):
        return StoredNumbers(MXFP4, lambda linear: mxfp4_matrix(linear, "weight_packed", "weight_scale"))
    return None


def _block(weights: Mapping[str, Any]) -> Block | None:
    match weights.get("strategy"), weights.get("block_structure"), weights.get("group_size"):
        case "tensor", _, _:
            return BY_TENSOR
        case "channel", _, _:
            return BY_ROW
        case "group", _, int(size) if size > 0:
            return 1, size
        case "block", [int(rows), int(columns)], _ if rows > 0 and columns > 0:
            return rows, columns
    return None

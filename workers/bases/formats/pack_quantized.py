"""Reads linears in the format pack-quantized of compressed-tensors, with integer codes of four or eight bits.

weight_packed [O, D * bits / 32] is packed along the inputs, weight_zero_point [O * bits / 32, G] along the outputs.
weight_scale is [O, G], and weight_shape has O and D. weight_g_idx [D] is each input's group, in any order; -1 means
that groups are runs. Codes and zeros are stored plus 2 ** (bits - 1), so they are not negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lorafleet.kernels.quant.int_weight import Bits, IntScheme
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.formats.packed_ints import (
    INTEGERS,
    PackedInts,
    dtype_of_matrix,
    group_of_columns,
    num_ordered_groups,
    stored_groups,
)


def int_scheme(weights: Mapping[str, Any]) -> IntScheme | None:
    """Returns the scheme of a config group's weights, or None if it is not served."""
    bits, group, strategy = weights.get("num_bits"), weights.get("group_size"), weights.get("strategy")
    if bits not in (4, 8) or isinstance(bits, float) or weights.get("type", "int") != "int" or weights.get("dynamic"):
        return None
    if strategy == "channel" and group in (None, -1):
        return IntScheme(bits, None, not weights.get("symmetric", True))
    if strategy == "group" and isinstance(group, int) and group >= 8 and group % 8 == 0:
        return IntScheme(bits, group, not weights.get("symmetric", True))
    return None


def as_stored(scheme: IntScheme, linear: LinearTensors) -> IntScheme:
    """Returns the linear's own scheme, with the dtype of its scales and the order of its groups."""
    scale = linear.stored("weight_scale")
    dtype = dtype_of_matrix(linear.path("weight_scale"), scale)
    group_D, groups = _groups(linear, scheme.bits), scale.get_shape()[1]
    ordered = num_ordered_groups(linear.path("weight_packed"), group_D, groups, scheme.group)
    return replace(scheme, ordered_groups=ordered, dtype=dtype)


def pack_quantized(linear: LinearTensors, scheme: IntScheme) -> PackedInts:
    """Returns the linear's weight, unread. Raises ConfigError if its tensors do not match."""
    code, scale = linear.stored("weight_packed"), linear.stored("weight_scale")
    zero = linear.stored("weight_zero_point") if scheme.has_zeros else None
    name, (outputs, inputs), per_int = linear.path("weight_packed"), _shape(linear), 32 // scheme.bits
    groups = scale.get_shape()[1]  # as_stored() has seen that it is a matrix
    if (
        code.get_shape() != [outputs, -(-inputs // per_int)]
        or scale.get_shape() != [outputs, groups]
        or (zero is not None and zero.get_shape() != [-(-outputs // per_int), groups])
    ):
        raise ConfigError(
            f"{name} has shape {code.get_shape()}, its scales {scale.get_shape()}, its zeros "
            f"{None if zero is None else zero.get_shape()} and weight_shape {[outputs, inputs]}, which do not match "
            f"each other with {scheme.bits} bits. quantization_config's num_bits is wrong, or the file is damaged.",
            "model",
        )
    if "weight" in linear:
        raise ConfigError(f"{linear.path('weight')} is beside {name}. Export the checkpoint again.", "model")
    if zero is None and "weight_zero_point" in linear:
        raise ConfigError(
            f"{name} has zero points, but quantization_config says symmetric. Correct config.json.", "model"
        )
    group_D = group_of_columns(name, _groups(linear, scheme.bits), inputs, groups, scheme.group)
    return PackedInts(name, (outputs, inputs), scheme.bits, code, 1, scale, zero, group_D, is_transposed=False)


def _groups(linear: LinearTensors, bits: Bits) -> Tensor | None:
    """Returns each input's group as the file has it, or None if groups are runs."""
    if "weight_g_idx" not in linear:
        return None
    packed = linear.stored("weight_packed").get_shape()
    most = packed[1] * (32 // bits) if len(packed) == 2 else 0  # inputs for which there are codes
    group_D = stored_groups(linear, "weight_g_idx", min(_shape(linear)[1], most))
    return None if bool((group_D == -1).all()) else group_D


def _shape(linear: LinearTensors) -> tuple[int, int]:
    """Returns O and D. Raises ConfigError if weight_shape does not have two integers."""
    shape_2 = linear.tensor("weight_shape", 2)
    if shape_2.shape != (2,) or shape_2.dtype not in INTEGERS:
        raise ConfigError(
            f"{linear.path('weight_shape')} is {shape_2.dtype} with shape {list(shape_2.shape)}; it must have two "
            "integers. Export the checkpoint again.",
            "model",
        )
    outputs, inputs = shape_2.tolist()
    return outputs, inputs

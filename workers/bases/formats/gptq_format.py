"""Reads linears that GPTQModel or AutoGPTQ stored: qweight, qzeros, scales and g_idx for each linear.

- qweight [D * bits / 32, O] is packed along the inputs, qzeros [G, O * bits / 32] along the outputs. scales is [G, O].
- g_idx [D] is each input's group. With desc_act, these are in any order.
- checkpoint_format gptq stores zeros minus one, subtracted from each int32 as a whole. gptq_v2 stores the zeros.
- `dynamic` may change bits, group_size and sym of a linear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from torch import Tensor

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.int_weight import Bits, IntScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.changed_settings import ChangedSettings
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.packed_ints import (
    PackedInts,
    dtype_of_matrix,
    group_of_columns,
    num_ordered_groups,
    stored_groups,
)

ONES = {4: 0x11111111, 8: 0x01010101}  # one in each number of an int32


class _Numbers(msgspec.Struct, frozen=True):
    """The part of quantization_config that `dynamic` may change."""

    bits: int
    group_size: int = 128
    sym: bool = True

    @property
    def group(self) -> int | None:
        return None if self.group_size == -1 else self.group_size


class GPTQFormat:
    tensors = re.compile("qweight|qzeros|scales|g_idx")
    other_tensors: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        stored_as = config.get("checkpoint_format") or config.get("format") or "gptq"
        if stored_as not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"quantization_config: checkpoint_format={stored_as!r} of GPTQ is not supported; gptq and gptq_v2 are. "
                f"{REMEDY}"
            )
        self._is_v1 = stored_as == "gptq"
        self._numbers: dict[str, _Numbers] = {}
        self.schemes: dict[str, Scheme] = {}
        changed = ChangedSettings(config)
        for module, name in linears.file_names(linears.with_tensor(re.compile("qweight")), "qweight"):
            numbers = _numbers(name, {**config, **changed.of(name)})
            self._numbers[module] = numbers
            self.schemes[module] = _scheme(linears.linear(module), numbers)

    def matrix(self, linear: LinearTensors) -> PackedInts:
        return _packed(linear, self._numbers[linear.module], self._is_v1)


def _numbers(name: str, own: Mapping[str, Any]) -> _Numbers:
    """Returns the numbers of a linear with these settings."""
    try:
        numbers = msgspec.convert(own, _Numbers)
    except msgspec.ValidationError as error:
        raise ConfigError(f"quantization_config of {name} cannot be read: {error}", "model") from None
    if numbers.bits not in ONES or own.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise UnsupportedModel(
            f"quantization_config: bits={numbers.bits} with pack_dtype={own.get('pack_dtype', 'int32')} for {name} is "
            f"not supported with GPTQ; 4 and 8 bits in int32 are. {REMEDY}"
        )
    if numbers.group_size != -1 and (numbers.group_size < 8 or numbers.group_size % 8):
        raise UnsupportedModel(
            f"quantization_config: group_size={numbers.group_size} for {name} is not supported; multiples of 8 and -1 "
            f"are. {REMEDY}"
        )
    return numbers


def _scheme(linear: LinearTensors, numbers: _Numbers) -> IntScheme:
    scale = linear.stored("scales")
    dtype = dtype_of_matrix(linear.path("scales"), scale)
    bits, groups = cast(Bits, numbers.bits), scale.get_shape()[0]
    own_groups = _own_groups(linear, _inputs(linear, bits))
    ordered = num_ordered_groups(linear.path("qweight"), own_groups, groups, numbers.group)
    return IntScheme(bits, numbers.group, not numbers.sym, ordered, dtype)


def _packed(linear: LinearTensors, numbers: _Numbers, is_v1: bool) -> PackedInts:
    bits = cast(Bits, numbers.bits)
    per_int = 32 // bits
    code, zero, scale = (linear.stored(leaf) for leaf in ("qweight", "qzeros", "scales"))
    if any(len(stored.get_shape()) != 2 for stored in (code, zero, scale)):
        raise ConfigError(f"{linear.path('qweight')}, its qzeros and its scales must be matrices.", "model")
    (rows, outputs), (groups, scaled) = code.get_shape(), scale.get_shape()
    inputs = _inputs(linear, bits)
    if scaled != outputs or zero.get_shape() != [groups, -(-outputs // per_int)]:
        raise ConfigError(
            f"{linear.path('qweight')} has shape {[rows, outputs]}, its scales {[groups, scaled]} and its qzeros "
            f"{zero.get_shape()}, which do not match each other with {bits} bits. quantization_config's bits is wrong, "
            "or the file is damaged.",
            "model",
        )
    group_D = group_of_columns(linear.path("qweight"), _own_groups(linear, inputs), inputs, groups, numbers.group)
    return PackedInts(
        linear.path("qweight"),
        (outputs, inputs),
        bits,
        code,
        0,
        scale,
        zero,
        group_D,
        is_transposed=True,
        zero_offset=ONES[bits] if is_v1 else 0,
        is_checked_symmetric=numbers.sym,
    )


def _inputs(linear: LinearTensors, bits: Bits) -> int:
    """Returns the number of inputs that the codes stand for, or 0 if they are no matrix."""
    shape = linear.stored("qweight").get_shape()
    return shape[0] * (32 // bits) if len(shape) == 2 else 0


def _own_groups(linear: LinearTensors, inputs: int) -> Tensor | None:
    """Returns each input's group as the file has it, or None if groups are runs."""
    return stored_groups(linear, "g_idx", inputs) if "g_idx" in linear else None

"""Reads linears that AutoAWQ or GPTQModel stored in AWQ's GEMM version: qweight, qzeros and scales for each linear.

qweight [D, O / n] and qzeros [G, O / n] have n numbers in an int32, packed along the outputs. scales is [G, O].

- 4 bits: n is 8. From the lowest bits on, the numbers are the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight.
- 8 bits, from GPTQModel alone: n is 4, and the outputs are in their order.
- With zero_point=false, as GPTQModel quantizes symmetrically, qzeros is stored too, and every zero is the same.
- `dynamic` may change bits and group_size of a linear. GPTQModel computes the zeros of such a linear by the unchanged
  settings, so they may differ from the middle and are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.int_weight import Bits, IntScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.changed_settings import ChangedSettings
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.packed_ints import PackedInts, dtype_of_matrix, group_of_columns
from lorafleet.workers.bases.text_part import spellings

ORDERS: dict[Bits, tuple[int, ...] | None] = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: None}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of one linear as they are stored."""

    bits: Bits
    group: int | None  # Columns of a group. None means whole rows.
    has_zeros: bool  # Zeros are read. Otherwise they are checked to be in the middle.


class AWQFormat:
    tensors = re.compile("qweight|qzeros|scales")
    other_tensors: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        self._numbers: dict[str, _Numbers] = {}
        self.schemes: dict[str, Scheme] = {}
        changed = ChangedSettings(config)
        for module, name in linears.file_names(linears.with_tensor(re.compile("qweight")), "qweight"):
            for skipped in config.get("modules_to_not_convert") or []:
                if any(skipped in spelled for spelled in spellings(name)):
                    raise ConfigError(
                        f"{name} is stored quantized, but quantization_config's modules_to_not_convert has "
                        f"{skipped!r}. Correct config.json.",
                        "model",
                    )
            own = _numbers(name, config, changed.of(name))
            linear = linears.linear(module)
            dtype = dtype_of_matrix(linear.path("scales"), linear.stored("scales"))
            self._numbers[module] = own
            self.schemes[module] = IntScheme(own.bits, own.group, own.has_zeros, 0, dtype)

    def matrix(self, linear: LinearTensors) -> PackedInts:
        name, own = linear.path("qweight"), self._numbers[linear.module]
        code, zero, scale = (linear.stored(leaf) for leaf in ("qweight", "qzeros", "scales"))
        if any(len(stored.get_shape()) != 2 for stored in (code, zero, scale)):
            raise ConfigError(f"{name}, its qzeros and its scales must be matrices.", "model")
        (inputs, packed), (groups, outputs) = code.get_shape(), scale.get_shape()
        if packed * (32 // own.bits) != outputs or zero.get_shape() != [groups, packed]:
            raise ConfigError(
                f"{name} has shape {[inputs, packed]}, its scales {[groups, outputs]} and its qzeros "
                f"{zero.get_shape()}, which do not match each other with {own.bits} bits. quantization_config's bits "
                "is wrong, or the file is damaged.",
                "model",
            )
        return PackedInts(
            name,
            (outputs, inputs),
            own.bits,
            code,
            1,
            scale,
            zero,
            group_of_columns(name, None, inputs, groups, own.group),
            is_transposed=True,
            order=ORDERS[own.bits],
            is_checked_symmetric=not own.has_zeros,
        )


def _numbers(name: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> _Numbers:
    """Returns the numbers of a linear, for which `changes` has other settings."""
    version = str(changes.get("format") or config.get("version") or config.get("format") or "gemm").lower()
    bits = changes.get("bits", config.get("bits", config.get("w_bit")))
    size = changes.get("group_size", config.get("group_size", config.get("q_group_size")))
    has_zeros, dtype = config.get("zero_point", True), changes.get("pack_dtype", config.get("pack_dtype", "int32"))
    if version != "gemm" or type(bits) is not int or bits not in ORDERS or not isinstance(has_zeros, bool):
        raise UnsupportedModel(
            f"quantization_config: AWQ with version={version}, bits={bits!r} and zero_point={has_zeros!r} for {name} "
            f"is not supported; version gemm with 4 or 8 bits is. {REMEDY}"
        )
    if dtype not in ("int32", "torch.int32"):
        raise UnsupportedModel(
            f"quantization_config: pack_dtype={dtype} for {name} is not supported with AWQ; int32 is. {REMEDY}"
        )
    if type(size) is not int or (size != -1 and (size < 8 or size % 8)):
        raise UnsupportedModel(
            f"quantization_config: group_size={size} for {name} is not supported with AWQ; multiples of 8 and -1 are. "
            f"{REMEDY}"
        )
    return _Numbers(bits, None if size == -1 else size, has_zeros or bool(changes))

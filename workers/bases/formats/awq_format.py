"""Reads linears that AutoAWQ or GPTQModel stored in AWQ's GEMM version: qweight, qzeros and scales for each linear.

qweight [D, O / 8] and qzeros [G, O / 8] have eight numbers of four bits in an int32, packed along the outputs. They are
the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight, from the lowest bits on. scales is [G, O]. With zero_point=false, as
GPTQModel quantizes symmetrically, qzeros is stored too, and every zero is 8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.int_weight import IntScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.packed_ints import PackedInts, dtype_of_matrix, group_of_columns
from lorafleet.workers.bases.text_part import spellings

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQFormat:
    tensors = re.compile("qweight|qzeros|scales")
    beside: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        self._has_zeros = config.get("zero_point", True)
        if version != "gemm" or bits != 4 or not isinstance(self._has_zeros, bool):
            raise UnsupportedModel(
                f"quantization_config: AWQ with version={version}, bits={bits} and zero_point={self._has_zeros!r} is "
                f"not supported; version gemm with 4 bits is. {REMEDY}"
            )
        if not isinstance(size, int) or (size != -1 and (size < 8 or size % 8)):
            raise UnsupportedModel(
                f"quantization_config: group_size={size} is not supported with AWQ; multiples of 8 and -1 are. {REMEDY}"
            )
        self._group = None if size == -1 else size
        self.schemes: dict[str, Scheme] = {}
        for module, name in linears.file_names(linears.with_tensor(re.compile("qweight")), "qweight"):
            for skipped in config.get("modules_to_not_convert") or []:
                if any(skipped in spelled for spelled in spellings(name)):
                    raise ConfigError(
                        f"{name} is stored quantized, but quantization_config's modules_to_not_convert has "
                        f"{skipped!r}. Correct config.json.",
                        "model",
                    )
            linear = linears.linear(module)
            dtype = dtype_of_matrix(linear.path("scales"), linear.stored("scales"))
            self.schemes[module] = IntScheme(4, self._group, self._has_zeros, 0, dtype)

    def matrix(self, linear: LinearTensors) -> PackedInts:
        name = linear.path("qweight")
        code, zero, scale = (linear.stored(leaf) for leaf in ("qweight", "qzeros", "scales"))
        if any(len(stored.get_shape()) != 2 for stored in (code, zero, scale)):
            raise ConfigError(f"{name}, its qzeros and its scales must be matrices.", "model")
        (inputs, packed), (groups, outputs) = code.get_shape(), scale.get_shape()
        if packed * 8 != outputs or zero.get_shape() != [groups, packed]:
            raise ConfigError(
                f"{name} has shape {[inputs, packed]}, its scales {[groups, outputs]} and its qzeros "
                f"{zero.get_shape()}, which do not match each other with 4 bits. The file is damaged.",
                "model",
            )
        group_D = group_of_columns(name, None, inputs, groups, self._group)
        return PackedInts(
            name,
            (outputs, inputs),
            4,
            code,
            1,
            scale,
            zero,
            group_D,
            is_transposed=True,
            order=ORDER,
            is_checked_symmetric=not self._has_zeros,
        )

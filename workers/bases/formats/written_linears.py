"""Writes linears in the libraries' formats that hold the values of `--quantization` exactly, for `lorafleet quantize`.

- nf4: bitsandbytes, without double quantization, which would round the blocks' magnitudes.
- fp8: compressed-tensors, e4m3 with a float32 scale for each row. Activations are rounded by token where the GPU
  multiplies e4m3 by e4m3, as with the option.
- int4: compressed-tensors, pack-quantized, symmetric, with groups of at most 128 columns.

bitsandbytes_format.py, float_codes.py and pack_quantized.py read them.
"""

# O out · D in

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import QuantizedMatrix
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.int_weight import ROUNDED_GROUP, IntMatrix
from lorafleet.kernels.quant.nf4 import BLOCK, NF4_BOOK, NF4Matrix
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.formats.packed_ints import packed_rows

INT_BITS = 4
CODES_PER_INT = 32 // INT_BITS
Shape = tuple[int, int]  # O, D


class WrittenLinear(Protocol):
    """The tensors of one linear, which are filled some rows at a time."""

    def fill(self, first_row: int, matrix: QuantizedMatrix) -> None:
        """Fills the rows from first_row on, which is a multiple of 64, with a matrix of the method's scheme."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by their names below the linear, such as "weight_scale"."""


class NF4Written:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        outputs, self._inputs = shape
        self._packed = torch.empty(outputs * self._inputs // 2, 1, dtype=torch.uint8, device=device)
        self._absmax_B = torch.empty(-(-outputs * self._inputs // BLOCK), dtype=torch.float32, device=device)
        self._book = torch.tensor(NF4_BOOK, device=device)
        state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": _name(dtype), "shape": list(shape)}
        self._state = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device=device)

    def fill(self, first_row: int, matrix: QuantizedMatrix) -> None:
        matrix = cast(NF4Matrix, matrix)
        rows, columns = (slice(0, size) for size in matrix.shape)
        code = matrix.code[rows, columns].flatten()
        first = first_row * self._inputs
        self._packed[first // 2 : (first + len(code)) // 2, 0] = torch.add(code[1::2], code[::2], alpha=16)
        self._absmax_B[first // BLOCK :][: len(matrix.absmax_B)] = matrix.absmax_B

    def tensors(self) -> dict[str, Tensor]:
        return {
            "weight": self._packed,
            "weight.absmax": self._absmax_B,
            "weight.quant_map": self._book,
            "weight.quant_state.bitsandbytes__nf4": self._state,
        }


class FP8Written:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:  # noqa: ARG002  as the others
        self._code_OD = torch.empty(shape, dtype=FP8, device=device)
        self._scale_O1 = torch.empty(shape[0], 1, dtype=torch.float32, device=device)

    def fill(self, first_row: int, matrix: QuantizedMatrix) -> None:
        matrix = cast(ScaledMatrix, matrix)
        rows, columns = (slice(0, size) for size in matrix.shape)
        own = slice(first_row, first_row + matrix.shape[0])
        self._code_OD[own] = matrix.code[rows, columns]
        self._scale_O1[own] = matrix.scale_RC

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self._code_OD, "weight_scale": self._scale_O1}


class Int4Written:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        outputs, inputs = shape
        self._packed = torch.empty(outputs, inputs // CODES_PER_INT, dtype=torch.int32, device=device)
        self._scale_OG = torch.empty(outputs, inputs // _int_group(inputs), dtype=dtype, device=device)
        self._shape = torch.tensor(shape, device=device)

    def fill(self, first_row: int, matrix: QuantizedMatrix) -> None:
        matrix = cast(IntMatrix, matrix)
        own = slice(first_row, first_row + len(matrix.code_OD))
        self._packed[own] = packed_rows(matrix.code_OD, matrix.bits)
        self._scale_OG[own] = matrix.scale_OG

    def tensors(self) -> dict[str, Tensor]:
        return {"weight_packed": self._packed, "weight_scale": self._scale_OG, "weight_shape": self._shape}


@dataclass(frozen=True, slots=True)
class WrittenFormat:
    """The format in which checkpoints of one method are written."""

    empty: Callable[[Shape, torch.dtype, torch.device], WrittenLinear]  # Takes the dtype that is quantized.
    # Returns quantization_config. It takes the shapes of the quantized linears and the names of plain modules, as the
    # files have them, and the dtype that was quantized.
    config: Callable[[Mapping[str, Shape], Sequence[str], torch.dtype], dict[str, Any]]
    refusal: Callable[[int], str | None] = lambda _: None  # Why a linear of so many inputs cannot be written.


def _nf4_config(linears: Mapping[str, Shape], plain: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:  # noqa: ARG001  as the others
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": _name(dtype),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(plain),
        "llm_int8_threshold": 6.0,
    }


def _fp8_config(linears: Mapping[str, Shape], plain: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:  # noqa: ARG001  as the others
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return _compressed("float-quantized", {"group_0": group}, plain)


def _int4_config(linears: Mapping[str, Shape], plain: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:  # noqa: ARG001  as the others
    """Has a group of linears for each size of groups of columns. Several are told apart by the linears' names alone,
    since libraries differ in whether a name counts more than the class."""
    size_of = {name: _int_group(inputs) for name, (_, inputs) in linears.items()}
    sizes = sorted(set(size_of.values()))
    groups: dict[str, Any] = {}
    for index, size in enumerate(sizes):
        weights = {"num_bits": INT_BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(sizes) == 1 else [name for name, own in size_of.items() if own == size],
            "weights": weights | {"dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
    return _compressed("pack-quantized", groups, plain)


def _compressed(stored_as: str, groups: dict[str, Any], plain: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
    }


def _int_group(inputs: int) -> int:
    return math.gcd(ROUNDED_GROUP, inputs)


def _int4_refusal(inputs: int) -> str | None:
    size = _int_group(inputs)
    if size % CODES_PER_INT == 0:
        return None
    return (
        f"a linear with {inputs} inputs is quantized to int4 in groups of {size} columns, which the format "
        f"pack-quantized cannot hold: it needs multiples of {CODES_PER_INT}. Use --quantization fp8."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


WRITTEN: dict[Method, WrittenFormat] = {
    "nf4": WrittenFormat(NF4Written, _nf4_config),
    "fp8": WrittenFormat(FP8Written, _fp8_config),
    "int4": WrittenFormat(Int4Written, _int4_config, _int4_refusal),
}

"""Gives a kernel behind code_operands.cuh the sources before it, and the arguments for a matrix."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lorafleet.kernels.quant.code_tiles import TILE

SOURCES = ("four_bit_primitives.cuh", "code_tiles.cuh", "code_operands.cuh")


class MatrixArguments(ctypes.Structure):
    """struct Matrix in code_operands.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_int) for name in ("inputs", "groups")),
        ("inverse", ctypes.c_uint),
    )

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, inputs: int, group: int) -> MatrixArguments:
        """Returns the arguments of a contiguous matrix. `group` is the number of inputs that share a scale."""
        assert codes.is_contiguous() and scales.is_contiguous()
        blocks = group // TILE  # 0 if a block has several groups
        inverse = -(-(1 << 32) // blocks) if blocks > 1 else 0
        zeros_at = None if zeros is None else zeros.data_ptr()
        return cls(codes.data_ptr(), scales.data_ptr(), zeros_at, inputs, inputs // group, inverse)


def operands_source() -> str:
    return "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)

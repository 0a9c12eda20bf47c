"""Runs four_bit.cu and four_bit_wide.cu as C++ on this CPU and compares their results with the values.

The GPU's instructions are emulated.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorafleet.kernels.nvrtc import MatrixMap
from lorafleet.kernels.quant import four_bit_cuda
from lorafleet.kernels.quant.four_bit_cuda import (
    KERNEL_SHAPES,
    FourBitArguments,
    FourBitKernels,
    Launch,
    four_bit_values,
    launch,
)
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from tests.kernels.quant.emulation import MOST_WARPS, compiled_emulation
from tests.kernels.quant.four_bit_cases import CASES, filled

SOURCES = Path(four_bit_cuda.__file__).parent
EMULATED = ["nf4", "int4 with zeros, groups of 32", "nvfp4"]  # one of each number of groups in a block
BY_NAME = {shape.name: shape for shape in KERNEL_SHAPES}
# Programs that share an item, that have several, that have whole ones, and that have none. 117 tokens are two launches
# of many_64.
LAUNCHES = (
    (7, 4, replace(BY_NAME["few_8"], most_idle=0)),
    (7, 2, BY_NAME["few_8"]),
    (13, 2, replace(BY_NAME["few_16"], most_idle=0)),
    (27, 3, BY_NAME["few_32"]),
    (27, 3, BY_NAME["many_32"]),
    (64 + 53, 1, BY_NAME["many_64"]),
    (27, 4, replace(BY_NAME["dense_32"], most_idle=0)),
    (27, 2, BY_NAME["dense_32"]),
    (53, 3, replace(BY_NAME["dense_64"], most_idle=0)),
    (53, 2, BY_NAME["narrow_64"]),
    (128 + 22, 3, replace(BY_NAME["dense_128"], most_idle=0)),
    (100, 5, replace(BY_NAME["narrow_128"], most_idle=0)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def compiled(weight: TiledWeight, folder: Path) -> ctypes.CDLL:
    options = [option for option in weight.variant.options if option.startswith("-D") and "WARPS" not in option]
    options += [f"-D{name.upper()}_WARPS={min(warps, MOST_WARPS)}" for name, warps in weight.variant.few_warps.items()]
    names = {"FOUR_BIT_SOURCE": "four_bit.cu", "WIDE_SOURCE": "four_bit_wide.cu", "DENSE_SOURCE": "four_bit_dense.cu"}
    sources = {name: SOURCES / file for name, file in names.items()}
    return compiled_emulation(options, sources, folder)


def emulated_map(matrix: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """Describes a matrix as emulated_gpu.h reads it."""
    return MatrixMap(matrix.data_ptr(), matrix.shape[1], matrix.shape[0], rows)


def emulated_kernels(
    library: ctypes.CDLL, programs: int, weight: TiledWeight, most_idle: int | None = None
) -> FourBitKernels:
    """Returns kernels for a GPU of that many programs. most_idle of None is that of each kernel."""

    def kernel(index: int) -> Launch:
        return lambda programs, arguments: library.emulate(index, programs, ctypes.byref(arguments))

    by_name = {shape.name: kernel(index) for index, shape in enumerate(KERNEL_SHAPES)}
    shapes = weight.variant.shapes(has_wgmma=True)
    if most_idle is not None:
        shapes = tuple(replace(shape, most_idle=most_idle) for shape in shapes)
    return FourBitKernels(
        shapes, by_name, kernel(len(KERNEL_SHAPES)), emulated_map, programs, dict.fromkeys(by_name, 1)
    )


@pytest.mark.parametrize("case", EMULATED)
def test_the_source_computes_products_and_values(case: str, folder: Path) -> None:
    scheme, dtype = CASES[case]
    weight = filled(scheme, 192, 320, dtype)  # three tiles of rows, so that an item of 128 is half outside
    library, generator = compiled(weight, folder), torch.Generator().manual_seed(4)
    assert library.bytes_of_arguments() == ctypes.sizeof(FourBitArguments)
    values = weight.dequantized().double()
    bias = torch.randn(192, generator=generator).to(dtype)
    for tokens, programs, shape in LAUNCHES:
        kernels = emulated_kernels(library, programs, weight)
        if shape.name not in {own.name for own in kernels.shapes}:
            continue
        x = torch.randn(tokens, 320, generator=generator).to(dtype)
        own_bias = bias if tokens < 60 else None
        want = x.double() @ values.T + (0 if own_bias is None else own_bias.double())
        y = launch(x, weight, own_bias, kernels, shape)
        assert (y.double() - want).norm() < 0.004 * want.norm(), shape
        assert not weight.tickets.any()
    out = torch.full((128, 320), torch.nan, dtype=dtype)
    four_bit_values(weight, out, 64, emulated_kernels(library, 1, weight))
    assert torch.equal(out, weight.dequantized(slice(64, None)))


def unused(_programs: int, _arguments: object) -> None:
    """Stands for a kernel that is not launched."""


def test_a_weight_of_few_rows_has_half_as_many_in_an_item_and_equal_programs_for_each() -> None:
    by_name = dict.fromkeys(BY_NAME, 1)
    kernels = FourBitKernels(KERNEL_SHAPES, dict.fromkeys(BY_NAME, unused), unused, emulated_map, 132, by_name)
    chosen = {
        (tokens, outputs): kernels.shape_of(tokens, outputs).name
        for tokens, outputs in ((17, 4096), (64, 4096), (64, 28672), (128, 6144), (256, 28672), (384, 4096))
    }
    assert list(chosen.values()) == ["dense_32", "narrow_64", "dense_64", "narrow_128", "dense_128", "narrow_128"]
    assert kernels.programs_for(BY_NAME["narrow_64"], 32 * 64, 32) == 128
    assert kernels.programs_for(BY_NAME["narrow_64"], 48 * 64, 48) == 132  # 96 would be too few
    assert kernels.programs_for(BY_NAME["few_8"], 64 * 64) == 132

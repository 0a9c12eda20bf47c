"""Compiles and launches four_bit.cu, four_bit_wide.cu and four_bit_dense.cu: products and values of four-bit weights.

kernels/moe/moe_codes_cuda.py launches those that are compiled for experts.
"""

# T tokens · D in · O out

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorafleet.kernels.lora.gemm_sms import sms_for_gemms
from lorafleet.kernels.nvrtc import CudaCode, CudaCodeError, MatrixMap, machine_code, matrix_map
from lorafleet.kernels.quant.code_tiles import TILE

if TYPE_CHECKING:
    from lorafleet.kernels.quant.tiled_weight import TiledWeight

log = logging.getLogger(__name__)

DTYPE_INDEX = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # SCALE and `rounded` in four_bit.cu
TABLE_BYTES = 0x10000  # of shared memory: the table of pairs
WARP_SUMS_BYTES = 2048  # of shared memory for eight tokens: the sums that a warp of few() leaves to another one
MANY_BYTES = 36864 + 98304  # behind the table, for many(): SUMS_BYTES and STAGE_BYTES in four_bit.cu
FLAGS_BYTES = 16  # of shared memory for few(): whether the program is an item's last one
WIDE_BYTES = 163840  # behind the table, for four_bit_wide.cu and four_bit_dense.cu
LEAST_CAPABILITY = (8, 0)  # bfloat16 in tensor cores and asynchronous copies
SOURCES = (
    *("four_bit_primitives.cuh", "code_tiles.cuh", "four_bit_wide.cuh"),
    *("four_bit.cu", "four_bit_wide.cu", "four_bit_dense.cu"),
)
MANY_WARPS = 8
WGMMA_CAPABILITY = (9, 0)  # no other GPU has wgmma
MAX_PROGRAMS = 512  # of a launch for products: a weight has a ticket for each
EVEN_SHARE = 0.95  # share of the programs above which they are as many for each item
RESIDENT = 2  # programs of few_8 and few_16 on an SM: benchmarks/NOTES.md, "Launches of four bits that overlap"
DEQUANTIZE_WARPS = 8  # each writes a tile


class FourBitArguments(ctypes.Structure):
    """The arguments of all kernels: struct Linear in four_bit.cu."""

    _fields_ = (
        ("x_map", MatrixMap),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "book")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y", "parts", "tickets")),
        *((name, ctypes.c_void_p) for name in ("used_tiles", "expert_of_tile", "pair_of_tile")),
        ("numbers", ctypes.c_uint * 8),
        *((name, ctypes.c_int) for name in ("tokens", "outputs", "inputs")),
        ("inverse", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("least_blocks", "most_idle", "blocks_a_group")),
        *((name, ctypes.c_int) for name in ("first_tile", "rounded")),
        ("_rest", ctypes.c_int * 7),  # a map begins at a multiple of 64 bytes, and so the structure ends at one
    )


Launch = Callable[[int, FourBitArguments], None]  # Takes the number of programs.


@dataclass(frozen=True, slots=True)
class FourBitVariant:
    """The weights and numbers that one compilation of four_bit.cu serves."""

    dtype: torch.dtype  # of x and y: bfloat16 or float16
    scale_dtype: torch.dtype
    groups_a_block: int  # groups in 64 inputs: 4, 2, or 1 if a group is 64 inputs or several times 64
    has_zeros: bool
    has_integers: bool  # whether the book is that of integers
    of_experts: bool = False  # whether the weight is that of all experts of a mixture

    @property
    def few_warps(self) -> dict[str, int]:
        """Returns the number of warps of each kernel for few tokens, 0 if it would not have enough registers.

        Each scale of a small group takes a register.
        """
        few_8, few_16, few_32 = {1: (16, 12, 8), 2: (12, 8, 0), 4: (8, 8, 0)}[self.groups_a_block]
        return {"few_8": few_8 // self.resident, "few_16": few_16 // self.resident, "few_32": few_32}

    @property
    def resident(self) -> int:
        """Returns how many programs of few_8 and few_16 have room on an SM together."""
        return 1 if self.of_experts else RESIDENT

    def resident_of(self, shape: KernelShape) -> int:
        """Returns how many programs of a kernel have room on an SM together."""
        return self.resident if shape.name in ("few_8", "few_16") else 1

    def program_size(self, shape: KernelShape) -> tuple[int, int]:
        """Returns the threads of a program of a kernel for products, and its bytes of shared memory."""
        if shape.needs_wgmma:
            return shape.wgmma_warps * 32, TABLE_BYTES + WIDE_BYTES
        warps = self.few_warps.get(shape.name)
        if warps is None:
            return MANY_WARPS * 32, TABLE_BYTES + MANY_BYTES
        return warps * 32, TABLE_BYTES + (warps - 1) * (shape.tokens // 8) * WARP_SUMS_BYTES + FLAGS_BYTES

    @property
    def options(self) -> list[str]:
        return [
            "--std=c++17",
            f"-DIS_HALF={int(self.dtype == torch.float16)}",
            f"-DSCALE={DTYPE_INDEX[self.scale_dtype]}",
            f"-DSUB={self.groups_a_block}",
            f"-DZEROS={int(self.has_zeros)}",
            f"-DINTEGERS={int(self.has_integers)}",
            f"-DEXPERTS={int(self.of_experts)}",
            f"-DRESIDENT={self.resident}",
            *(f"-D{name.upper()}_WARPS={warps}" for name, warps in self.few_warps.items()),
        ]

    def shapes(self, has_wgmma: bool) -> tuple[KernelShape, ...]:
        """Returns the kernels for products, in the order in which they are tried for a number of tokens."""
        return tuple(
            shape
            for shape in KERNEL_SHAPES
            if self.few_warps.get(shape.name) != 0
            and (has_wgmma or not shape.needs_wgmma)
            and (shape.serves_experts if self.of_experts else shape.serves_dense)
        )


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A kernel for products, and how its work is divided."""

    name: str
    tokens: int  # most tokens of an item
    serves: int  # most tokens for which it is chosen, in several launches if they are more than a launch takes
    rows: int  # rows of W of an item
    least_blocks: int  # blocks of 64 inputs that a program has at least, or adding its parts would be more work
    most_idle: int  # blocks that programs may lack on average if no two share an item then
    spans: int = 1  # most items of a launch that have the same rows and different tokens, without experts
    serves_dense: bool = True
    serves_experts: bool = (
        True  # whether it is also compiled for experts, with a tile of pairs as the tokens of an item
    )
    wgmma_warps: int = 0  # warps of a program that multiplies by wgmma
    least_items: int = 0  # items of a launch without experts; with fewer ones, the next kernel is chosen

    @property
    def needs_wgmma(self) -> bool:
        """Whether it multiplies by wgmma."""
        return self.wgmma_warps > 0

    @property
    def maps_x(self) -> bool:
        """Whether it is one of four_bit_dense.cu, for which the copy engine arranges x."""
        return self.needs_wgmma and not self.serves_experts

    @property
    def launch_tokens(self) -> int:
        """Most tokens of a launch."""
        return self.tokens * self.spans

    def items(self, tokens: int, outputs: int) -> int:
        """Returns the number of items of a launch without experts."""
        return -(-outputs // self.rows) * -(-min(tokens, self.launch_tokens) // self.tokens)


# Measured on an H200, the wide ones on an H100: benchmarks/NOTES.md, "Four bits by wgmma" and the sections behind it.
KERNEL_SHAPES = (
    KernelShape("few_8", 8, 8, TILE, 8, 20),
    KernelShape("few_16", 16, 16, TILE, 8, 20),
    KernelShape("dense_32", 32, 32, 4 * TILE, 4, 8, serves_experts=False, wgmma_warps=20),
    KernelShape("dense_64", 64, 64, 4 * TILE, 4, 6, serves_experts=False, wgmma_warps=20, least_items=64),
    KernelShape("narrow_64", 64, 64, 2 * TILE, 4, 6, serves_experts=False, wgmma_warps=12),
    KernelShape("dense_128", 128, 384, 4 * TILE, 4, 3, 3, serves_experts=False, wgmma_warps=12, least_items=64),
    KernelShape("narrow_128", 128, 384, 2 * TILE, 4, 3, 3, serves_experts=False, wgmma_warps=12),
    KernelShape("wide_32", 32, 32, 4 * TILE, 4, 8, serves_dense=False, wgmma_warps=12),
    KernelShape("wide_64", 64, 64, 4 * TILE, 4, 6, serves_dense=False, wgmma_warps=12),
    KernelShape("wide_128", 128, 256, 4 * TILE, 4, 3, serves_dense=False, wgmma_warps=12),
    # Without wgmma:
    KernelShape("few_32", 32, 64, TILE, 8, 0, serves_experts=False),
    # for groups of 16 and 32, for which few_32 has no registers
    KernelShape("many_32", 32, 32, 2 * TILE, 4, 0, serves_experts=False),
    KernelShape("many_64", 64, 64, 2 * TILE, 4, 0, serves_experts=False),
)


@dataclass(frozen=True, slots=True)
class FourBitKernels:
    """The compiled kernels of a variant on one GPU."""

    shapes: tuple[KernelShape, ...]  # in the order in which they are tried
    by_name: dict[str, Launch]
    dequantize: Launch
    map_of: Callable[[Tensor, int], ctypes.Array[ctypes.c_uint64]]  # matrix_map() of nvrtc.py
    num_sms: int
    resident: dict[str, int]  # programs of each kernel that run on an SM at the same time

    @property
    def most_tokens(self) -> int:
        """Most tokens for which a kernel is chosen."""
        return max(shape.serves for shape in self.shapes)

    def shape_of(self, tokens: int, outputs: int) -> KernelShape:
        """Returns the first kernel that serves so many tokens, which are most_tokens or less, and rows of W."""
        return next(
            shape
            for shape in self.shapes
            if tokens <= shape.serves and shape.items(tokens, outputs) >= shape.least_items
        )

    def shape_of_tile(self, pairs: int) -> KernelShape:
        """Returns the kernel for tiles of so many pairs of tokens and experts."""
        return next(shape for shape in self.shapes if shape.tokens == pairs)

    def programs_for(self, shape: KernelShape, blocks: int, items: int = 0) -> int:
        """Returns the number of programs for a product of that many blocks, which are 64 inputs of an item each.

        If the number of items is given, as many programs share each of them, where that leaves few SMs without one.
        """
        assert blocks * MAX_PROGRAMS < 1 << 32, "the kernels divide blocks among programs in 32 bits"
        most = min(sms_for_gemms(self.num_sms) * self.resident[shape.name], MAX_PROGRAMS)
        if items and most // items * items > EVEN_SHARE * most:
            most = most // items * items
        return min(most, -(-blocks // shape.least_blocks))


def source() -> str:
    folder = Path(__file__).parent
    return "".join((folder / name).read_text() for name in SOURCES)


def four_bit_kernels(variant: FourBitVariant, device: torch.device) -> FourBitKernels | None:
    """Returns the kernels, or None if this machine cannot compile or run them. The cause is logged once."""
    return _kernels(variant, torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kernels(variant: FourBitVariant, index: int) -> FourBitKernels | None:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    room = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub does not have it
    if capability < LEAST_CAPABILITY or room < TABLE_BYTES + WIDE_BYTES:
        return None  # Such a GPU is served by the Triton kernels, as it always was.
    has_wgmma = capability == WGMMA_CAPABILITY
    if variant.of_experts and not has_wgmma:
        return None  # Tiles of many pairs are served by wgmma alone.
    shapes = variant.shapes(has_wgmma)
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            code = CudaCode(machine_code(source(), variant.options, device))
            products: dict[str, Launch] = {shape.name: _product(code, variant, shape, has_wgmma) for shape in shapes}
            resident = {shape.name: variant.resident_of(shape) for shape in shapes}
            dequantize = code.kernel("dequantize", DEQUANTIZE_WARPS * 32, 0)
            return FourBitKernels(shapes, products, dequantize, matrix_map, properties.multi_processor_count, resident)
    except CudaCodeError as error:
        log.warning("weights of four bits are served by slower kernels: %s", error)
        return None


def _product(code: CudaCode, variant: FourBitVariant, shape: KernelShape, has_wgmma: bool) -> Launch:
    threads, shared_bytes = variant.program_size(shape)
    waits = variant.of_experts and shape.needs_wgmma
    may_be_early = shape.needs_wgmma or shape.name in variant.few_warps  # many() does not wait for the launch ahead
    early = has_wgmma and may_be_early and not variant.of_experts
    return code.kernel(shape.name, threads, shared_bytes, waits=waits, early=early)


def four_bit_linear(x_TD: Tensor, weight: TiledWeight, bias_O: Tensor | None, kernels: FourBitKernels) -> Tensor:
    """Returns x @ W.T + bias."""
    return launch(x_TD, weight, bias_O, kernels, kernels.shape_of(len(x_TD), weight.num_outputs))


def launch(
    x_TD: Tensor, weight: TiledWeight, bias_O: Tensor | None, kernels: FourBitKernels, shape: KernelShape
) -> Tensor:
    """Returns x @ W.T + bias by one kernel, which is launched several times if there are more tokens than it takes.

    x is contiguous, begins at a multiple of 16 bytes, and has the weight's dtype, as the bias has.
    """
    assert x_TD.shape[1] == weight.num_inputs and x_TD.is_contiguous() and x_TD.dtype == weight.dtype
    assert x_TD.data_ptr() % 16 == 0
    assert bias_O is None or (bias_O.is_contiguous() and bias_O.dtype == weight.dtype)
    outputs, device = weight.num_outputs, x_TD.device
    items = shape.items(len(x_TD), outputs)
    programs = kernels.programs_for(shape, items * (weight.num_inputs // TILE), items if shape.maps_x else 0)
    y_TO = torch.empty(len(x_TD), outputs, dtype=weight.dtype, device=device)
    parts_a_program = 1 if shape.maps_x else 2
    parts = torch.empty(programs * parts_a_program * shape.tokens * shape.rows, dtype=torch.float32, device=device)
    arguments = arguments_of(weight)
    arguments.parts, arguments.outputs = parts.data_ptr(), outputs
    arguments.most_idle = shape.most_idle
    arguments.bias = None if bias_O is None else bias_O.data_ptr()
    for first in range(0, len(x_TD), shape.launch_tokens):
        x = x_TD[first : first + shape.launch_tokens]
        arguments.x, arguments.y, arguments.tokens = x.data_ptr(), y_TO[first:].data_ptr(), len(x)
        if shape.maps_x:
            arguments.x_map = kernels.map_of(x, shape.tokens)
        kernels.by_name[shape.name](programs, arguments)
    return y_TO


def four_bit_values(weight: TiledWeight, out_OD: Tensor, first_row: int, kernels: FourBitKernels) -> Tensor:
    """Writes values of W into out_OD and returns it. It has rows of W from first_row on, whole tiles of them."""
    rows = len(out_OD)
    assert rows % TILE == first_row % TILE == 0 and first_row + rows <= weight.num_outputs
    assert out_OD.is_contiguous() and out_OD.dtype == weight.dtype
    assert weight.quantized_from is not None
    arguments = arguments_of(weight)
    arguments.y, arguments.outputs, arguments.first_tile = out_OD.data_ptr(), rows, first_row // TILE
    arguments.rounded = DTYPE_INDEX[weight.quantized_from]
    tiles = rows // TILE * (weight.num_inputs // TILE)
    kernels.dequantize(-(-tiles // DEQUANTIZE_WARPS), arguments)
    return out_OD


def arguments_of(weight: TiledWeight) -> FourBitArguments:
    """Returns the arguments that are the same in each launch with this weight."""
    return FourBitArguments(
        codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(),
        zeros=None if weight.zeros is None else weight.zeros.data_ptr(),
        book=weight.book.data_ptr(),
        numbers=weight.numbers,
        tickets=weight.tickets.data_ptr(),
        inputs=weight.num_inputs,
        blocks_a_group=max(1, weight.group // TILE),
    )

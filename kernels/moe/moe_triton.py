"""Linears of a mixture of experts on the GPU: one launch for all pairs of a step, whichever experts were chosen.
kernels/moe/moe_torch.py has the twin.

Idea: a program takes a tile of pairs that share an expert (kernels/moe/moe_tiles_triton.py) and a block of outputs. It
gathers rows of x by pair and scatters rows of the result, so nothing is copied into order. Unused tiles end at once.
The adapters' P is computed separately (kernels/moe/expert_lora_triton.py): on a side stream beside the GEMM while that
waits for the experts' weights, or before the GEMM in a step with long prompts. The kernel that reads the output
multiplies P by B. So adapters on experts add two launches to a step, and one more for B of down in a step with many
pairs. In a step with few pairs, sorting takes one or two more with them than without.

Memory: x [T, D] or [N, D], w [E, O, D] and out [N, O] are row-major. kernels/moe/moe_codes_cuda.py and
moe_codes_triton.py have the GEMMs for quantized experts. For long prompts, the values of four-bit experts are written
once, some experts at a time, since decoding them for each tile would take longer.
The tile shapes of plain experts were measured on an H200 by benchmarks/moe_kernels.py.
"""

# T tokens · K experts a token · E experts · N pairs · D in · O out

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.adapted_activation_triton import activate_adapted
from lorafleet.kernels.moe.adapted_combine_triton import combine_adapted
from lorafleet.kernels.moe.expert_activation import ExpertActivation, activate_experts
from lorafleet.kernels.moe.expert_codes import WRITTEN_PAIRS, ExpertCodes, ExpertMatrix, is_tiled, written_experts
from lorafleet.kernels.moe.expert_lora import ExpertOutput, StepExperts
from lorafleet.kernels.moe.expert_lora_triton import expand_experts, shrink_experts
from lorafleet.kernels.moe.moe_codes_cuda import tiled_experts_linear
from lorafleet.kernels.moe.moe_codes_triton import codes_linear
from lorafleet.kernels.moe.moe_combine_triton import combine_triton
from lorafleet.kernels.moe.moe_tiles_triton import (
    FEW,
    MANY_PAIRS,
    AdapterTiles,
    ExpertTiles,
    make_adapter_tiles,
    make_tiles,
)
from lorafleet.kernels.moe.moe_torch import SharedOutput


@dataclass(frozen=True, slots=True)
class _Gemm:
    """The shape of the programs of plain experts' GEMM."""

    block_o: int
    block_d: int  # in half precision
    warps: int
    stages: int

    def blocks(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """Returns the outputs and the inputs of a program's block, and the stages of its loop.

        In float32, which has no tensor cores here, Triton unrolls a block's products for each thread. With 256 outputs,
        compiling took 9 to 18 s; with FLOAT32_O, a thread has at most 1024 products, and it takes 2 s.
        """
        if dtype.itemsize == 2:
            return self.block_o, self.block_d, self.stages
        return min(self.block_o, FLOAT32_O), self.block_d // 2, 2  # The stages are limited by the shared memory.


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of the tiles of pairs, of the adapters' tiles and of the GEMM's programs."""

    tile_pairs: int
    gemm: _Gemm | None  # None if the CUDA kernels read the experts' codes
    adapter_pairs: int = 16  # pairs in a tile of the adapters
    beside: bool = True  # whether the adapters run beside the GEMM


_Shapes = tuple[tuple[float, _Shape], ...]
# The key is the largest average number of pairs per expert for which the shape is used.
_SHAPES: _Shapes = (
    (8, _Shape(16, _Gemm(64, 128, 4, 3))),
    (48, _Shape(32, _Gemm(64, 128, 4, 4))),
    (96, _Shape(64, _Gemm(128, 64, 4, 4), beside=False)),
    (256, _Shape(128, _Gemm(256, 64, 8, 4), beside=False)),
    (float("inf"), _Shape(128, _Gemm(256, 64, 8, 4), adapter_pairs=64, beside=False)),
)
# For the CUDA kernels, of which there is one for each number of pairs in a tile. From 32 on they leave no room beside
# them.
_TILED_SHAPES: _Shapes = (
    (5, _Shape(8, None)),
    (10, _Shape(16, None)),
    (40, _Shape(32, None, beside=False)),
    (80, _Shape(64, None, beside=False)),
    (WRITTEN_PAIRS, _Shape(128, None, beside=False)),
    (float("inf"), _Shape(128, _Gemm(256, 64, 8, 4), adapter_pairs=64, beside=False)),
)
FLOAT32_O = 64
# Up to so many pairs, the weighted sum reads B of down for each pair, instead of additions that were written.
MOST_FOLDED_PAIRS = 2048


def _shapes(are_tiled: bool) -> _Shapes:
    return _TILED_SHAPES if are_tiled else _SHAPES


def _shape_for(num_pairs: int, num_experts: int, are_tiled: bool) -> _Shape:
    return next(shape for most, shape in _shapes(are_tiled) if num_pairs <= most * num_experts)


def first_tokens(num_experts: int, per_token: int, are_tiled: bool) -> list[int]:
    """Returns the numbers of tokens from which on steps have other variants of the kernels."""
    most_pairs = [int(most * num_experts) for most, _ in _shapes(are_tiled)[:-1]] + [FEW[0], MANY_PAIRS]
    return sorted({most // per_token + 1 for most in most_pairs})


@jit(do_not_specialize=["pairs_a_row", "first_expert", "num_experts"])
def _linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.tensor,
    num_features: tl.constexpr,
    num_outputs: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (num_outputs + block_o - 1) // block_o
    tile = tl.program_id(0) // blocks
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    there = (pair >= 0)[:, None]
    o = (tl.program_id(0) % blocks) * block_o + tl.arange(0, block_o)
    d = tl.arange(0, block_d)
    x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features + d[None, :]
    w_row = w_ptr + (expert * num_outputs + o)[None, :] * num_features + d[:, None]
    acc = tl.zeros((tile_pairs, block_o), dtype=tl.float32)
    for first_d in tl.range(0, num_features, block_d):
        x = tl.load(x_row + first_d, mask=there & (first_d + d < num_features)[None, :], other=0.0)
        w = tl.load(w_row + first_d, mask=(o < num_outputs)[None, :] & (first_d + d < num_features)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = out_ptr + pair[:, None] * num_outputs + o[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=there & (o < num_outputs)[None, :])


@dataclass(frozen=True, slots=True)
class PairTiles:
    """All pairs of a step, in tiles by expert."""

    expert_TK: Tensor
    shape: _Shape
    are_tiled: bool  # as that of the ExpertMatrices
    tiles: ExpertTiles
    adapter_tiles: AdapterTiles | None  # None if no adapter is on experts

    @property
    def num_pairs(self) -> int:
        return self.expert_TK.numel()

    @classmethod
    def of(cls, expert_TK: Tensor, num_experts: int, are_tiled: bool, adapters: StepExperts | None) -> PairTiles:
        """Sorts the pairs by expert, and by slot if there are adapters. are_tiled is that of the ExpertMatrices.

        `adapters` are those on any linear of the mixture, since all have the same tokens and slots.
        """
        shape = _shape_for(expert_TK.numel(), num_experts, are_tiled)
        if adapters is None:
            return cls(expert_TK, shape, are_tiled, make_tiles(expert_TK, num_experts, shape.tile_pairs), None)
        tiles = make_adapter_tiles(expert_TK, num_experts, shape.tile_pairs, adapters, shape.adapter_pairs)
        return cls(expert_TK, shape, are_tiled, *tiles)

    def linear(self, x: Tensor, w_EOD: ExpertMatrix, adapters: StepExperts | None = None) -> ExpertOutput:
        if adapters is None:
            return ExpertOutput(self._base(x, w_EOD))
        assert self.adapter_tiles is not None
        side = adapters.side_stream
        if side is None or not self.shape.beside:
            p_KNC = shrink_experts(x, self.num_pairs, self.adapter_tiles, adapters)
            return ExpertOutput(self._base(x, w_EOD), p_KNC, adapters)
        main = torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            p_KNC = shrink_experts(x, self.num_pairs, self.adapter_tiles, adapters)
        out_NO = self._base(x, w_EOD)
        main.wait_stream(side)
        # record_stream is not needed: each stream waits for the other before it reuses freed memory.
        return ExpertOutput(out_NO, p_KNC, adapters)

    def activate(self, gate_up: ExpertOutput, activation: ExpertActivation, bias_EU: Tensor | None) -> Tensor:
        y_NU, p_KNC, adapters = gate_up
        if p_KNC is None or adapters is None:
            return activate_experts(LinearOutput(y_NU), activation, self.expert_TK.view(-1), bias_EU)
        assert self.adapter_tiles is not None
        return activate_adapted(y_NU, p_KNC, activation, bias_EU, self.adapter_tiles, adapters)

    def combine(
        self, down: ExpertOutput, weight_TK: Tensor | None, bias_ED: Tensor | None, shared: SharedOutput | None
    ) -> Tensor:
        y_ND, p_KNC, adapters = down
        if p_KNC is None or adapters is None:
            return combine_triton(y_ND, self.expert_TK, weight_TK, bias_ED, shared)
        if self.num_pairs <= MOST_FOLDED_PAIRS:
            return combine_adapted(y_ND, p_KNC, self.expert_TK, weight_TK, bias_ED, shared, adapters)
        assert self.adapter_tiles is not None
        delta_ND = expand_experts(p_KNC, y_ND.shape[1], y_ND.dtype, self.adapter_tiles, adapters)
        return combine_triton(y_ND, self.expert_TK, weight_TK, bias_ED, shared, delta_ND, adapters)

    def _base(self, x: Tensor, w_EOD: ExpertMatrix) -> Tensor:
        if isinstance(w_EOD, ExpertCodes) and not (self.are_tiled and self.shape.gemm is not None):
            multiply = tiled_experts_linear if is_tiled(w_EOD) else codes_linear
            return multiply(x, w_EOD, self.tiles, self.num_pairs)
        out_NO = torch.empty(self.num_pairs, w_EOD.shape[1], dtype=x.dtype, device=x.device)
        if not isinstance(w_EOD, ExpertCodes):
            self._multiply(x, w_EOD, out_NO, 0)
            return out_NO
        num_experts, count = w_EOD.shape[0], written_experts(w_EOD.shape)
        for first in range(0, num_experts, count):
            self._multiply(x, w_EOD.values(first, min(first + count, num_experts)), out_NO, first)
        return out_NO

    def _multiply(self, x: Tensor, w_EOD: Tensor, out_NO: Tensor, first_expert: int) -> None:
        """Writes the products of the pairs whose experts are those of w, the first of which is first_expert."""
        num_experts, num_outputs, num_features = w_EOD.shape
        assert x.is_contiguous() and w_EOD.is_contiguous() and x.shape[1] == num_features
        assert x.dtype == w_EOD.dtype and self.num_pairs % len(x) == 0
        gemm = self.shape.gemm
        assert gemm is not None
        block_o, block_d, stages = gemm.blocks(x.dtype)
        _linear_kernel[(self.tiles.num_tiles * triton.cdiv(num_outputs, block_o),)](
            x,
            w_EOD,
            out_NO,
            self.tiles.expert_M,
            self.tiles.pair_MB,
            self.num_pairs // len(x),
            first_expert,
            num_experts,
            num_features=num_features,
            num_outputs=num_outputs,
            tile_pairs=self.shape.tile_pairs,
            block_o=block_o,
            block_d=block_d,
            num_warps=gemm.warps,
            num_stages=stages,
        )

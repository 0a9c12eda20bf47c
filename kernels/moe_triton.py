"""Linears of a mixture of experts on the GPU: one launch for all pairs of a step, whichever experts were chosen.
kernels/moe_torch.py has the twin.

Idea: the pairs are sorted by expert into tiles of pairs that share one, by counting: a program an expert counts its
pairs, then a program an expert adds up the tiles of those before it and writes its own. Then a GEMM takes a tile and
a block of outputs a program: rows of x are gathered by pair, rows of the result scattered, so nothing is copied into
order. There are as many tiles as any choice may need; those left over end at once.

Adapters: a launch before it writes P = scale * A x of each pair's own adapter, in splits of D that the GEMM adds up,
which multiplies them by B behind its own sum. Both go through a tile's slots one after the other, each with the rows of
the others masked; a tile has few, as tokens of one prompt follow each other. Any adapters share the launches.

Memory: x [T, D] or [N, D], w [E, O, D] and out [N, O] row-major. Tables int32: expert_M of each tile (-1: none),
pair_MB its pairs, then -1. P [K, N, C] fp32, C as kernels/expert_lora.py has it; what no adapter has is not written,
and not read. A and B lie where the slot's record says.
Tile shapes measured on an H200 by benchmarks/moe_kernels.py.
"""

# T tokens · E experts · N pairs · D in · O out · M tiles · B pairs of a tile · K splits of D · C columns of P

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.expert_lora import StepExperts

BLOCK_N = 1024  # pairs that a counting program reads at a time
SPLIT_FEATURES = 512  # of D, in the shrink
MAX_SPLITS = 8
SHRINK_D = 128  # features at a time, of a half precision
MIN_BLOCK_C, MAX_BLOCK_C = 16, 32
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of the GEMM's programs; block_d in bytes of x's dtype times 2: elements of a half precision."""

    tile_pairs: int
    block_o: int
    block_d: int
    warps: int
    stages: int


# By how many pairs an expert has on average, at most.
_SHAPES = (
    (8, _Shape(16, 64, 128, 4, 4)),
    (48, _Shape(32, 64, 128, 4, 4)),
    (96, _Shape(64, 128, 64, 4, 4)),
    (float("inf"), _Shape(128, 128, 64, 8, 4)),
)


def _shape_for(num_pairs: int, num_experts: int) -> _Shape:
    return next(shape for most, shape in _SHAPES if num_pairs <= most * num_experts)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]  # triton has no types
def _count_kernel(expert_ptr: tl.tensor, count_ptr: tl.tensor, num_pairs: tl.tensor, block_n: tl.constexpr) -> None:
    expert = tl.program_id(0)
    count = tl.zeros((block_n,), tl.int32)
    for first in tl.range(0, num_pairs, block_n):
        n = first + tl.arange(0, block_n)
        own = tl.load(expert_ptr + n, mask=n < num_pairs, other=-1) == expert
        count += own.to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])  # type: ignore[untyped-decorator]  # triton has no types
def _place_kernel(
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_e: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    e = tl.arange(0, block_e)
    counts = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tiles = tl.cdiv(counts, tile_pairs)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    end_tile = first_tile + tl.cdiv(count, tile_pairs)
    i = tl.arange(0, block_n)
    for first in tl.range(first_tile, end_tile, block_n):
        tl.store(expert_of_tile_ptr + first + i, expert, mask=first + i < end_tile)
    if expert == num_experts - 1:
        for first in tl.range(end_tile, num_tiles, block_n):
            tl.store(expert_of_tile_ptr + first + i, -1, mask=first + i < num_tiles)
    own_ptr = pair_ptr + first_tile * tile_pairs
    placed = 0
    for first in tl.range(0, num_pairs, block_n):
        n = first + i
        own = tl.load(expert_ptr + n, mask=n < num_pairs, other=-1) == expert
        place = placed + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(own_ptr + place, n, mask=own)
        placed += tl.sum(own.to(tl.int32), 0)
    rest = count + tl.arange(0, tile_pairs)
    tl.store(own_ptr + rest, -1, mask=rest < (end_tile - first_tile) * tile_pairs)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _least_slot(slots: tl.tensor) -> tl.tensor:
    """NO_SLOT where none is left."""
    return tl.min(tl.where(slots >= 0, slots, 1 << 30), 0)


# Slots and records begin anywhere in larger tensors: their alignment must not ask for another kernel.
@triton.jit(do_not_specialize=["slot_ptr", "record_ptr", "pairs_a_row", "pairs_a_token", "num_pairs", "num_columns"])  # type: ignore[untyped-decorator]  # triton has no types
def _shrink_kernel(
    x_ptr: tl.tensor,
    p_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    pairs_a_token: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_features: tl.constexpr,
    split_features: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_c: tl.constexpr,
    block_d: tl.constexpr,
    a_dtype: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    split = tl.program_id(1)
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    slots = tl.load(slot_ptr + pair // pairs_a_token, mask=pair >= 0, other=-1)
    d = tl.arange(0, block_d)
    x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features
    p_row = p_ptr + (split.to(tl.int64) * num_pairs + pair[:, None]) * num_columns
    end = min((split + 1) * split_features, num_features)
    slot = _least_slot(slots)
    while slot < (1 << 30):
        record = tl.load(record_ptr + slot)
        if record != 0:
            fields = record.to(tl.pointer_type(tl.int64))
            rank = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 8)
            groups = tl.load(fields + 4).to(tl.int32)
            columns = rank * groups
            a_ptr = tl.multiple_of(record + tl.load(fields), 16).to(tl.pointer_type(a_dtype))
            a_ptr += expert * columns * num_features
            scale_ptr = (record + tl.load(fields + 2)).to(tl.pointer_type(tl.float32)) + expert * groups
            own = (slots == slot)[:, None]
            for first in tl.range(0, columns, block_c):
                c = first + tl.arange(0, block_c)
                inside = (c < columns)[None, :]
                a_row = a_ptr + c.to(tl.int64)[None, :] * num_features
                acc = tl.zeros((tile_pairs, block_c), dtype=tl.float32)
                for at in tl.range(split * split_features, end, block_d):
                    there = at + d < end
                    x = tl.load(x_row + (at + d)[None, :], mask=own & there[None, :], other=0.0)
                    a = tl.load(a_row + (at + d)[:, None], mask=inside & there[:, None], other=0.0)
                    acc = tl.dot(x.to(a.dtype), a, acc, input_precision="ieee")
                scale = tl.load(scale_ptr + c // rank, mask=c < columns, other=0.0)
                tl.store(p_row + c[None, :], acc * scale[None, :], mask=own & inside)
        slots = tl.where(slots == slot, -1, slots)
        slot = _least_slot(slots)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _expanded(
    acc: tl.tensor,
    p_ptr: tl.tensor,
    pair: tl.tensor,
    expert: tl.tensor,
    slots: tl.tensor,
    record_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_splits: tl.constexpr,
    first_output: tl.tensor,
    num_outputs: tl.constexpr,
    block_o: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> tl.tensor:
    """acc + B P of each pair's own adapter."""
    o = first_output + tl.arange(0, block_o)
    slot = _least_slot(slots)
    while slot < (1 << 30):
        record = tl.load(record_ptr + slot)
        if record != 0:
            fields = record.to(tl.pointer_type(tl.int64))
            rank = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 8)
            groups = tl.load(fields + 4).to(tl.int32)
            b_ptr = tl.multiple_of(record + tl.load(fields + 1), 16).to(tl.pointer_type(b_dtype))
            b_row = b_ptr + (expert * num_outputs + o)[None, :] * rank
            own = (slots == slot)[:, None]
            outputs = num_outputs // groups
            # The groups that have outputs among these: as a rule one.
            for group in tl.range(first_output // outputs, min(groups, tl.cdiv(first_output + block_o, outputs))):
                its = (o // outputs == group) & (o < num_outputs)
                for first in tl.range(0, rank, block_r):
                    r = first + tl.arange(0, block_r)
                    p_row = p_ptr + pair[:, None] * num_columns + (group * rank + r)[None, :]
                    p = tl.zeros((acc.shape[0], block_r), dtype=tl.float32)
                    for split in tl.static_range(num_splits):
                        at = p_row + num_pairs.to(tl.int64) * num_columns * split
                        p += tl.load(at, mask=own & (r < rank)[None, :], other=0.0)
                    b = tl.load(b_row + r[:, None], mask=its[None, :] & (r < rank)[:, None], other=0.0)
                    acc = tl.dot(p.to(b.dtype), b, acc, input_precision="ieee")
        slots = tl.where(slots == slot, -1, slots)
        slot = _least_slot(slots)
    return acc


@triton.jit(do_not_specialize=["slot_ptr", "record_ptr", "pairs_a_row", "pairs_a_token", "num_pairs", "num_columns"])  # type: ignore[untyped-decorator]  # triton has no types
def _linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    p_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    pairs_a_token: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_features: tl.constexpr,
    num_outputs: tl.constexpr,
    num_splits: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (num_outputs + block_o - 1) // block_o
    tile = tl.program_id(0) // blocks
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    there = (pair >= 0)[:, None]
    o = (tl.program_id(0) % blocks) * block_o + tl.arange(0, block_o)
    d = tl.arange(0, block_d)
    x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features + d[None, :]
    w_row = w_ptr + (expert * num_outputs + o)[None, :] * num_features + d[:, None]
    acc = tl.zeros((tile_pairs, block_o), dtype=tl.float32)
    for at in tl.range(0, num_features, block_d):
        x = tl.load(x_row + at, mask=there & (at + d < num_features)[None, :], other=0.0)
        w = tl.load(w_row + at, mask=(o < num_outputs)[None, :] & (at + d < num_features)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if num_splits > 0:
        slots = tl.load(slot_ptr + pair // pairs_a_token, mask=pair >= 0, other=-1)
        first_output = (tl.program_id(0) % blocks) * block_o
        acc = _expanded(
            acc, p_ptr, pair, expert, slots, record_ptr, num_pairs, num_columns, num_splits, first_output, num_outputs,
            block_o, block_r, b_dtype,
        )  # fmt: skip
    out = out_ptr + pair[:, None] * num_outputs + o[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=there & (o < num_outputs)[None, :])


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A step's pairs in tiles, see above."""

    num_pairs: int
    shape: _Shape
    expert_M: Tensor
    pair_MB: Tensor

    @classmethod
    def of(cls, expert_TK: Tensor, num_experts: int) -> ExpertTiles:
        """expert_TK: int32, contiguous."""
        assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int32
        device, num_pairs = expert_TK.device, expert_TK.numel()
        shape = _shape_for(num_pairs, num_experts)
        # Each expert rounds up once at most.
        num_tiles = min(num_pairs, num_experts + num_pairs // shape.tile_pairs)
        count_E = torch.empty(num_experts, dtype=torch.int32, device=device)
        expert_M = torch.empty(num_tiles, dtype=torch.int32, device=device)
        pair_MB = torch.empty(num_tiles, shape.tile_pairs, dtype=torch.int32, device=device)
        _count_kernel[(num_experts,)](expert_TK, count_E, num_pairs, block_n=BLOCK_N)
        _place_kernel[(num_experts,)](
            expert_TK,
            count_E,
            expert_M,
            pair_MB,
            num_pairs,
            num_tiles,
            num_experts=num_experts,
            tile_pairs=shape.tile_pairs,
            block_e=triton.next_power_of_2(num_experts),
            block_n=BLOCK_N,
        )
        return cls(num_pairs, shape, expert_M, pair_MB)

    def linear(self, x: Tensor, w_EOD: Tensor, adapters: StepExperts | None = None) -> Tensor:
        _, num_outputs, num_features = w_EOD.shape
        assert x.is_contiguous() and w_EOD.is_contiguous() and x.shape[1] == num_features
        assert x.dtype == w_EOD.dtype and self.num_pairs % len(x) == 0
        out_NO = torch.empty(self.num_pairs, num_outputs, dtype=x.dtype, device=x.device)
        shape = self.shape
        p_KNC = None if adapters is None else self._shrunk(x, adapters)
        _linear_kernel[(len(self.expert_M) * triton.cdiv(num_outputs, shape.block_o),)](
            x,
            w_EOD,
            out_NO,
            self.expert_M,
            self.pair_MB,
            p_KNC,
            None if adapters is None else adapters.slot_T,
            None if adapters is None else adapters.record_S,
            self.num_pairs // len(x),
            1 if adapters is None else self.num_pairs // len(adapters.slot_T),
            self.num_pairs,
            0 if p_KNC is None else p_KNC.shape[2],
            num_features=num_features,
            num_outputs=num_outputs,
            num_splits=0 if p_KNC is None else len(p_KNC),
            tile_pairs=shape.tile_pairs,
            block_o=shape.block_o,
            block_d=shape.block_d * 2 // x.dtype.itemsize,
            block_r=16 if adapters is None else _block_c(adapters),
            b_dtype=None if adapters is None else TRITON_DTYPES[adapters.dtype],
            num_warps=shape.warps,
            num_stages=shape.stages if x.dtype.itemsize == 2 else 2,  # what shared memory holds
        )
        return out_NO

    def _shrunk(self, x: Tensor, adapters: StepExperts) -> Tensor:
        """P."""
        num_features = x.shape[1]
        splits = min(MAX_SPLITS, triton.cdiv(num_features, SPLIT_FEATURES))
        columns = adapters.columns
        p_KNC = torch.empty(splits, self.num_pairs, columns, dtype=torch.float32, device=x.device)
        block_d = SHRINK_D * 2 // x.dtype.itemsize
        _shrink_kernel[(len(self.expert_M), splits)](
            x,
            p_KNC,
            self.expert_M,
            self.pair_MB,
            adapters.slot_T,
            adapters.record_S,
            self.num_pairs // len(x),
            self.num_pairs // len(adapters.slot_T),
            self.num_pairs,
            columns,
            num_features=num_features,
            split_features=triton.cdiv(triton.cdiv(num_features, splits), block_d) * block_d,
            tile_pairs=self.shape.tile_pairs,
            block_c=_block_c(adapters),
            block_d=block_d,
            a_dtype=TRITON_DTYPES[adapters.dtype],
            num_warps=4,
            num_stages=3,
        )
        return p_KNC


def _block_c(adapters: StepExperts) -> int:
    """Columns of P, and ranks, that a program takes at a time."""
    return MIN_BLOCK_C if adapters.max_rank <= MIN_BLOCK_C else MAX_BLOCK_C

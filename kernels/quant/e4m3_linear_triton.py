"""x @ W.T on tensor cores that multiply e4m3 by e4m3, compute capability 9.0: W is never converted.

Idea: x is split into pairs of e4m3 numbers (kernels/quant/e4m3_pairs.py), or rounded to one. Codes of W go from shared
memory into the tensor cores. A step of the loop multiplies one block of columns. If W has groups, their scales multiply
the step's float32 sum. With few tokens x is split in the loop, beside the loads of W, with a scale for each step.
Otherwise a kernel splits or rounds it before, with a scale for each row.

Small products divide the inputs among programs. Each stores its part of the tile, and the last one to arrive at the
tile's counter adds the parts, in a fixed order, so every run gives the same bits. It also resets the counter.

On a GPU, a launch begins before the kernel ahead of it has ended (programmatic dependent launch). It requests the
beginning of its rows of W, which no kernel writes, into the L2 cache, and then waits for x.

Memory: x [T, D] or its pairs [T, N, D], codes [O, D], scales of W [O, G], scales of x [T, 1], y [T, O], all row-major.
Parts are [K, tiles, block_o, block_t].
"""

# T tokens · N numbers of a pair · D in · O out · G groups of columns · K splits

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.linear.split_linear_triton import request_rows
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.lora.split_sum_triton import MAX_SPLITS, MIN_STEPS
from lorafleet.kernels.quant.e4m3_pairs import pair_block
from lorafleet.kernels.quant.e4m3_pairs_triton import pair_product, split_block, split_pairs_triton
from lorafleet.kernels.quant.e4m3_tuning import E4M3Shape, e4m3_tuning
from lorafleet.kernels.quant.fp8 import FP8

PREFETCH_CHUNK = 512  # bytes of a row that are requested at a time
REQUEST_ALIGNMENT = 16  # a request begins at a multiple of so many bytes


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["num_tokens"])
def _e4m3_linear_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    part_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_tokens: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    steps_a_split: tl.constexpr,
    splits: tl.constexpr,
    splits_inside: tl.constexpr,
    rounds_x: tl.constexpr,
    has_bias: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
    prefetch: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    # Programs that share codes are neighbors, so that the second one finds them in the L2 cache.
    t = tl.program_id(0) * block_t + tl.arange(0, block_t)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    t_inside, o_inside = t < num_tokens, o < outputs
    rows_a_token: tl.constexpr = 1 if splits_inside or rounds_x else 2  # a pair's numbers are two rows
    x_row = tl.program_id(0) * (block_t * rows_a_token) + tl.arange(0, block_t * rows_a_token)
    first = tl.program_id(2) * steps_a_split * block_d
    last = tl.minimum(first + steps_a_split * block_d, inputs)
    if early:
        if prefetch > 0:
            request_rows(code_ptr, tl.program_id(1) * block_o, first, inputs, block_o, prefetch, chunk)
        gdc_wait()
    d = tl.arange(0, block_d)
    x_tile = x_ptr + x_row[None, :].to(tl.int64) * inputs + d[:, None]
    row = tl.where(o_inside, o, 0)  # rows beyond the last are computed from another one, and not stored
    code_tile = code_ptr + row[:, None].to(tl.int64) * inputs + d[None, :]
    acc = tl.zeros((block_o, block_t), dtype=tl.float32)
    for first_d in tl.range(first, last, block_d, num_stages=stages):
        x_inside = (x_row < num_tokens * rows_a_token)[None, :]
        if inputs % block_d == 0:
            code = tl.load(code_tile + first_d)
        else:
            d_inside = first_d + d < inputs
            x_inside = x_inside & d_inside[:, None]
            code = tl.load(code_tile + first_d, mask=d_inside[None, :], other=0.0)
        x = tl.load(x_tile + first_d, mask=x_inside, other=0.0)
        if splits_inside:
            pairs, x_scale = split_block(x)
            product = pair_product(code, pairs) * x_scale[None, :]
        elif rounds_x:
            product = tl.dot(code, x)
        else:
            product = pair_product(code, x)
        if group < inputs:
            product *= tl.load(scale_ptr + row * (inputs // group) + first_d // group)[:, None]
        acc += product
    if not splits_inside:
        acc *= tl.load(x_scale_ptr + t, mask=t_inside, other=0.0)[None, :]
    if group == inputs:
        acc *= tl.load(scale_ptr + row)[:, None]
    is_last = True
    if splits > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        place = tl.arange(0, block_o)[:, None] * block_t + tl.arange(0, block_t)[None, :]
        part_tile = part_ptr + tile.to(tl.int64) * (block_o * block_t) + place
        stride = tiles.to(tl.int64) * (block_o * block_t)
        tl.store(part_tile + tl.program_id(2) * stride, acc)
        tl.debug_barrier()  # all threads have stored before one of them counts
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            # Other multiprocessors wrote the parts: they are in the L2 cache, and not in this one's.
            acc = tl.load(part_tile, cache_modifier=".cg")
            for k in tl.static_range(1, splits):
                acc += tl.load(part_tile + k * stride, cache_modifier=".cg")
    if is_last:
        if has_bias:
            acc += tl.load(bias_ptr + o, mask=o_inside, other=0.0).to(tl.float32)[:, None]
        y_tile = y_ptr + t[None, :].to(tl.int64) * outputs + o[:, None]
        tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=o_inside[:, None] & t_inside[None, :])


def e4m3_linear_triton(
    x_TD: Tensor,
    code_OD: Tensor,
    scale_OG: Tensor,
    bias_O: Tensor | None,
    arrived_M: Tensor,
    rounds_x: bool = False,
    shape: E4M3Shape | None = None,
) -> Tensor:
    """Returns x @ (scale * code).T + bias in x's dtype. x is exact (kernels/quant/e4m3_pairs.py), or rounded if asked.

    All tensors are contiguous. arrived_M are counters of tiles, int32, which are zero before and after; only products
    that run one after the other may share them. pair_block must take the groups. `shape` is the tuned one by default.
    """
    (num_tokens, inputs), (outputs, num_groups) = x_TD.shape, scale_OG.shape
    assert code_OD.shape == (outputs, inputs) and code_OD.dtype == FP8 and inputs % num_groups == 0
    assert x_TD.is_contiguous() and code_OD.is_contiguous() and scale_OG.is_contiguous()
    assert arrived_M.dtype == torch.int32
    block_d = pair_block(inputs, inputs // num_groups)
    shape = shape or e4m3_tuning(x_TD.device).shape(num_tokens, outputs, rounds_x)
    assert block_d is not None and not (shape.splits_inside and rounds_x)
    tiles = triton.cdiv(num_tokens, shape.block_t), triton.cdiv(outputs, shape.block_o)
    steps, num_tiles = triton.cdiv(inputs, block_d), tiles[0] * tiles[1]
    wanted = min(MAX_SPLITS, shape.programs // num_tiles, steps // MIN_STEPS) if num_tiles <= len(arrived_M) else 1
    steps_a_split = triton.cdiv(steps, max(1, wanted))
    splits = triton.cdiv(steps, steps_a_split)
    early = may_start_early(x_TD.device)
    is_inside = outputs % shape.block_o == 0 and shape.prefetch <= inputs - (splits - 1) * steps_a_split * block_d
    may_request = is_inside and inputs % REQUEST_ALIGNMENT == 0
    y_TO = torch.empty(num_tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    part = y_TO
    if splits > 1:
        numbers = splits * num_tiles * shape.block_o * shape.block_t
        part = torch.empty(numbers, dtype=torch.float32, device=x_TD.device)
    x, x_scale = (x_TD, scale_OG) if shape.splits_inside else split_pairs_triton(x_TD, rounds_x)
    _e4m3_linear_kernel[(*tiles, splits)](
        x,
        x_scale,
        code_OD,
        scale_OG,
        scale_OG if bias_O is None else bias_O,
        part,
        arrived_M,
        y_TO,
        num_tokens,
        outputs=outputs,
        inputs=inputs,
        group=inputs // num_groups,
        steps_a_split=steps_a_split,
        splits=splits,
        splits_inside=shape.splits_inside,
        rounds_x=rounds_x,
        has_bias=bias_O is not None,
        block_o=shape.block_o,
        block_t=shape.block_t,
        block_d=block_d,
        stages=shape.stages,
        early=early,
        prefetch=shape.prefetch if may_request else 0,  # every request must lie in W
        chunk=min(shape.prefetch, PREFETCH_CHUNK),
        num_warps=shape.warps,
        **early_launch(early),
    )
    return y_TO

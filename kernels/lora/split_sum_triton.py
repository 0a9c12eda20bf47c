"""GEMMs whose inputs are divided among programs: the number of splits, the place of each program's part, and the sum
of the parts, y = scale * sum over K of part_KTO + bias.

Idea: with few tokens, a GEMM's outputs are too few tiles for a GPU, so each tile's inputs are divided too. The sum is
elementwise, in a fixed order and without atomics, so every run gives the same bits.
"""

# T tokens · O out · K splits

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

PROGRAMS = 264  # programs of one launch: two per multiprocessor of an H200, as measured there
MAX_SPLITS = 8
MIN_STEPS = 4  # fewest steps of a split
BLOCK_O = 512


@jit()
def store_part(
    acc: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    o: tl.tensor,
    t: tl.tensor,
    num_tokens: tl.tensor,
    outputs: tl.constexpr,
    has_bias: tl.constexpr,
) -> None:
    """Stores acc, a tile [o, t] of split program_id(2), in y [K, T, O]. has_bias is only for a single split."""
    o_inside, t_inside = o < outputs, t < num_tokens
    if has_bias:
        acc += tl.load(bias_ptr + o, mask=o_inside, other=0.0).to(tl.float32)[:, None]
    split = tl.program_id(2).to(tl.int64) * num_tokens * outputs
    y_tile = y_ptr + split + t[None, :].to(tl.int64) * outputs + o[:, None]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=o_inside[:, None] & t_inside[None, :])


@jit()
def _split_sum_kernel(
    part_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    outputs: tl.constexpr,
    num_splits: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    block_o: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    inside = o < outputs
    stride = tl.num_programs(0).to(tl.int64) * outputs
    acc = tl.load(part_ptr + token * outputs + o, mask=inside, other=0.0)
    for k in tl.static_range(1, num_splits):
        acc += tl.load(part_ptr + k * stride + token * outputs + o, mask=inside, other=0.0)
    if has_scale:
        acc *= tl.load(scale_ptr + o, mask=inside, other=0.0)
    if has_bias:
        acc += tl.load(bias_ptr + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * outputs + o, acc.to(y_ptr.dtype.element_ty), mask=inside)


def steps_a_split(num_steps: int, num_tiles: int) -> int:
    """Returns the number of steps in a split.

    num_steps is the number that a program without splits would take to go through the inputs. num_tiles counts the
    tiles of the outputs.
    """
    wanted = max(1, min(MAX_SPLITS, PROGRAMS // num_tiles, num_steps // MIN_STEPS))
    return -(-num_steps // wanted)


def split_sum_triton(
    part_KTO: Tensor, dtype: torch.dtype, bias_O: Tensor | None, scale_O: Tensor | None = None
) -> Tensor:
    """Returns the sum of the parts in dtype, scaled and with the bias. part_KTO is float32 and contiguous."""
    num_splits, num_tokens, outputs = part_KTO.shape
    assert part_KTO.is_contiguous() and part_KTO.dtype == torch.float32
    y_TO = torch.empty(num_tokens, outputs, dtype=dtype, device=part_KTO.device)
    _split_sum_kernel[(num_tokens, triton.cdiv(outputs, BLOCK_O))](
        part_KTO,
        y_TO,
        part_KTO if scale_O is None else scale_O,
        part_KTO if bias_O is None else bias_O,
        outputs=outputs,
        num_splits=num_splits,
        has_scale=scale_O is not None,
        has_bias=bias_O is not None,
        block_o=BLOCK_O,
    )
    return y_TO

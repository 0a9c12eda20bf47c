"""Linears of a mixture whose experts have codes of four bits, by the CUDA kernels of kernels/quant/four_bit.cu.

Idea: the kernels for dense weights are compiled a second time, for tiles of pairs of a token and its expert. A tile
multiplies the rows of its expert, gathers its rows of x by pair, and scatters those of y. The work of all tiles is
divided evenly among the programs, which read from memory how many tiles a step has. So the launch is the same for any
choice of experts. There is one kernel for each number of pairs in a tile.
"""

# N pairs · D in · O out · E experts

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.moe_tiles_triton import ExpertTiles
from lorafleet.kernels.quant.code_tiles import TILE
from lorafleet.kernels.quant.four_bit_cuda import FourBitKernels, arguments_of, four_bit_kernels
from lorafleet.kernels.quant.tiled_weight import TiledWeight


def tiled_experts_linear(x: Tensor, experts: ExpertCodes, tiles: ExpertTiles, num_pairs: int) -> Tensor:
    """Returns for each pair x times its expert's weight, [N, O]. x is [T, D] or [N, D], and contiguous."""
    assert isinstance(experts.weight, TiledWeight)
    kernels = four_bit_kernels(experts.weight.variant, x.device)
    assert kernels is not None  # or tiled_weight() would have returned None
    return launch_tiles(x, experts, tiles, num_pairs, kernels)


def launch_tiles(
    x: Tensor, experts: ExpertCodes, tiles: ExpertTiles, num_pairs: int, kernels: FourBitKernels
) -> Tensor:
    """Returns tiled_experts_linear() by the kernel for tiles of that size."""
    weight, (_, outputs, inputs) = experts.weight, experts.shape
    assert isinstance(weight, TiledWeight) and weight.variant.of_experts
    assert x.is_contiguous() and x.shape[1] == inputs and x.dtype == weight.dtype and x.data_ptr() % 16 == 0
    pairs_a_row = num_pairs // len(x)
    assert num_pairs == pairs_a_row * len(x) and num_pairs * pairs_a_row < 1 << 32
    shape = kernels.shape_of_tile(tiles.tile_pairs)
    blocks = tiles.num_tiles * -(-outputs // shape.rows) * (inputs // TILE)
    programs = kernels.programs_for(shape, blocks)
    y_NO = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs * 2 * shape.tokens * shape.rows, dtype=torch.float32, device=x.device)
    arguments = arguments_of(weight)
    arguments.x, arguments.y, arguments.parts = x.data_ptr(), y_NO.data_ptr(), parts.data_ptr()
    arguments.outputs, arguments.least_blocks, arguments.most_idle = outputs, shape.least_blocks, shape.most_idle
    arguments.inverse = 0 if pairs_a_row == 1 else -(-(1 << 32) // pairs_a_row)
    arguments.used_tiles, arguments.expert_of_tile = tiles.used_1.data_ptr(), tiles.expert_M.data_ptr()
    arguments.pair_of_tile = tiles.pair_MB.data_ptr()
    kernels.by_name[shape.name](programs, arguments)
    return y_NO

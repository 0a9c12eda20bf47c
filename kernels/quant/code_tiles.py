"""The order in which four-bit codes and their groups' numbers lie for kernels/quant/four_bit.cu.

A tile is 64 rows and 64 inputs, in 2048 bytes. A lane of a warp reads 16 bytes in a row, which are its operands of four
products of mma.m16n8k16, for 16 rows. A byte holds two inputs side by side, the first one in its lower four bits. Bytes
lie by tile, then by 16 rows (M), row of eight (N), four lanes that share the row (L), 32 inputs (A), two products of
them (B), two of the lane's four inputs (P), and first or second eight of the 16 rows (H):

    row = 16 M + 8 H + N        input = 32 A + 8 L + 4 B + 2 P (+ 1 for the upper bits)

The tensor cores give the inputs of a product another order. This is correct as long as the activations have the same
order, and it lets a lane read eight inputs of x side by side. A product must not mix groups, so with groups of 16
inputs A is 16 inputs, with one product, and a lane reads four: input = 16 A + 4 L + 2 P.

Numbers of groups lie by 64 rows, group, N, H and M: a lane reads those of its eight rows at once.
"""

# R tiles of rows · C tiles of inputs · O out · D in · G groups of a row

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64


def empty_codes(outputs: int, inputs: int, group: int) -> tuple[int, ...]:
    """Returns the shape of the codes of a weight, whose sizes are multiples of TILE. A group is 16 inputs or more."""
    assert outputs % TILE == inputs % TILE == 0 and group >= 16
    products = 1 if group == 16 else 2
    return outputs // TILE, inputs // TILE, 4, 8, 4, 4 // products, products, 2, 2


def empty_numbers(outputs: int, groups: int) -> tuple[int, ...]:
    """Returns the shape of one number for each group of a row."""
    return outputs // TILE, groups, 8, 2, 4


def put_codes(tiles: Tensor, first_row: int, code_OD: Tensor) -> None:
    """Writes the codes of some rows, from first_row on. Codes are uint8, 0 to 15, on any device."""
    num_tiles, runs, products = tiles.shape[1], *tiles.shape[5:7]
    pair = code_OD.view(len(code_OD), num_tiles, runs, 4, products, 2, 2)  # O C A L B P, and which one of the pair
    byte = pair[..., 0] | (pair[..., 1] << 4)
    _rows_of_codes(tiles)[_place(tiles, first_row, len(code_OD))] = byte.transpose(2, 3).to(tiles.device)


def take_codes(tiles: Tensor, rows: slice) -> Tensor:
    """Returns the codes of some rows, [O, D]."""
    first, end, _ = rows.indices(len(tiles) * TILE)
    byte = _rows_of_codes(tiles)[_place(tiles, first, end - first)].transpose(2, 3)
    return torch.stack([byte & 15, byte >> 4], dim=-1).reshape(end - first, -1)


def put_numbers(tiles: Tensor, first_row: int, number_OG: Tensor) -> None:
    """Writes the numbers of the groups of some rows, from first_row on."""
    _rows_of_numbers(tiles)[_place(tiles, first_row, len(number_OG))] = number_OG.to(tiles.device, tiles.dtype)


def take_numbers(tiles: Tensor, rows: slice) -> Tensor:
    """Returns the numbers of the groups of some rows, [O, G]."""
    first, end, _ = rows.indices(len(tiles) * TILE)
    return _rows_of_numbers(tiles)[_place(tiles, first, end - first)]


def _rows_of_codes(tiles: Tensor) -> Tensor:
    return tiles.data.permute(0, 2, 8, 3, 1, 4, 5, 6, 7)  # R M H N, C L A B P


def _rows_of_numbers(tiles: Tensor) -> Tensor:
    return tiles.data.permute(0, 4, 3, 2, 1)  # R M H N, G


def _place(tiles: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the indices R, M, H and N of some rows."""
    row = torch.arange(first_row, first_row + rows, device=tiles.device)
    return row // TILE, row // 16 % 4, row // 8 % 2, row % 8

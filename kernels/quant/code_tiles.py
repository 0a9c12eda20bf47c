"""The order in which four-bit codes and their groups' numbers lie for kernels/quant/four_bit.cu.

A tile is 64 rows and 64 inputs, in 2048 bytes. A byte holds two inputs side by side, the first one in its lower four
bits. Bytes lie by tile, then by 16 rows (M), piece, four of eight inputs in a row (B), two of these (P), 32 inputs (A),
and first or second eight of the 16 rows (H). A piece is the bytes of a row of eight (N) and eight inputs in a row of
32 (L):

    row = 16 M + 8 H + N        input = 32 A + 8 L + 4 B + 2 P (+ 1 for the upper bits)

A lane of a warp reads its operands of four products of 16 rows and 16 inputs in one of two ways:

- It reads a piece. The inputs of a product are then in another order than those of x. This is correct as long as x has
  the same order, and it lets a lane read eight inputs of x side by side.
- It reads four bytes of a row's four pieces, all of B and P. The inputs are then in the order of x, which wgmma needs.

PIECES says where a piece lies: those of two rows in 128 bytes, which eight lanes read in the first way, and those of
the same inputs in different banks of shared memory, which all lanes read in the second way.

A product must not mix groups, so with groups of 16 inputs A is 16 inputs and L four, and there is no B:
input = 16 A + 4 L + 2 P.

Numbers of groups lie by 64 rows, group, N, H and M: a lane reads those of its eight rows at once.
"""

# R tiles of rows · C tiles of inputs · O out · D in · G groups of a row

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
PIECES = torch.tensor([[n // 2 * 8 + (run ^ n // 2) * 2 + n % 2 for run in range(4)] for n in range(8)])  # [N, L]


def empty_codes(outputs: int, inputs: int, group: int) -> tuple[int, ...]:
    """Returns the shape of the codes of a weight, whose sizes are multiples of TILE. A group is 16 inputs or more."""
    assert outputs % TILE == inputs % TILE == 0 and group >= 16
    products = 1 if group == 16 else 2
    return outputs // TILE, inputs // TILE, 4, 32, products, 2, 4 // products, 2


def empty_numbers(outputs: int, groups: int) -> tuple[int, ...]:
    """Returns the shape of one number for each group of a row."""
    return outputs // TILE, groups, 8, 2, 4


def put_codes(tiles: Tensor, first_row: int, code_OD: Tensor) -> None:
    """Writes the codes of some rows, from first_row on. Codes are uint8, 0 to 15, on any device."""
    num_tiles, products, runs = tiles.shape[1], tiles.shape[4], tiles.shape[6]
    pair = code_OD.view(len(code_OD), num_tiles, runs, 4, products, 2, 2)  # O C A L B P, and which one of the pair
    byte = pair[..., 0] | (pair[..., 1] << 4)
    _pieces_of_codes(tiles)[_pieces(tiles, first_row, len(code_OD))] = byte.permute(0, 3, 1, 4, 5, 2).to(tiles.device)


def take_codes(tiles: Tensor, rows: slice) -> Tensor:
    """Returns the codes of some rows, [O, D]."""
    first, end, _ = rows.indices(len(tiles) * TILE)
    byte = _pieces_of_codes(tiles)[_pieces(tiles, first, end - first)].permute(0, 2, 5, 1, 3, 4)
    return torch.stack([byte & 15, byte >> 4], dim=-1).reshape(end - first, -1)


def put_numbers(tiles: Tensor, first_row: int, number_OG: Tensor) -> None:
    """Writes the numbers of the groups of some rows, from first_row on."""
    _rows_of_numbers(tiles)[_place(tiles, first_row, len(number_OG))] = number_OG.to(tiles.device, tiles.dtype)


def take_numbers(tiles: Tensor, rows: slice) -> Tensor:
    """Returns the numbers of the groups of some rows, [O, G]."""
    first, end, _ = rows.indices(len(tiles) * TILE)
    return _rows_of_numbers(tiles)[_place(tiles, first, end - first)]


def _pieces_of_codes(tiles: Tensor) -> Tensor:
    return tiles.data.permute(0, 2, 7, 3, 1, 4, 5, 6)  # R M H and piece, C B P A


def _rows_of_numbers(tiles: Tensor) -> Tensor:
    return tiles.data.permute(0, 4, 3, 2, 1)  # R M H N, G


def _pieces(tiles: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the indices R, M, H and piece of some rows and each L."""
    tile, m, h, n = _place(tiles, first_row, rows)
    return tile[:, None], m[:, None], h[:, None], PIECES.to(tiles.device)[n]


def _place(tiles: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the indices R, M, H and N of some rows."""
    row = torch.arange(first_row, first_row + rows, device=tiles.device)
    return row // TILE, row // 16 % 4, row // 8 % 2, row % 8

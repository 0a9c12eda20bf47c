"""Chooses how attention kernels take wide heads: how many of them share a tile, and in which parts a key is taken."""

from __future__ import annotations

import triton

LEAST_ROWS = 16  # tl.dot's smallest M
WIDEST_HEAD = 256  # numbers of the widest head whose tiles need no care
SWIZZLED_COLUMNS = 64  # columns of a tile in half precision from which on shared memory holds all tiles in one layout


def is_wide(head_dim: int) -> bool:
    """Returns whether a tile of all query heads of a KV head might not fit into an SM."""
    return head_dim > WIDEST_HEAD


def heads_of_tile(heads_of_kv_head: int, head_dim: int, most: int) -> int:
    """Returns how many query heads of a KV head share a tile: all, or at most `most` wide ones. It divides their
    number."""
    if not is_wide(head_dim):
        return heads_of_kv_head
    return max(n for n in range(1, most + 1) if heads_of_kv_head % n == 0)


def parts_of_head(head_dim: int) -> tuple[int, int]:
    """Returns the sizes of the two parts in which a key is taken. The second is 0 if there is only one part."""
    whole = max(16, triton.next_power_of_2(head_dim))
    tail = head_dim - whole // 2
    if not is_wide(head_dim) or tail > whole // 4:
        return whole, 0
    return whole // 2, max(16, triton.next_power_of_2(tail))


def values_like_keys(block_v: int, block_d: int) -> int:
    """Returns the columns of a tile of values, at least block_v, with which it is laid out as a tile of keys is.

    Keys and values that are converted from e4m3 take turns in one place of shared memory. If their layouts differ,
    ptxas of CUDA 12.8 reads the values' address from a register that it has not written
    (tests/kernels/test_machine_code.py).
    """
    return max(block_v, min(block_d, SWIZZLED_COLUMNS))

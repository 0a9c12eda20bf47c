"""Chooses how attention kernels take wide heads: how many of them share a tile, and in which parts a key is taken."""

from __future__ import annotations

import triton

LEAST_ROWS = 16  # tl.dot's smallest M
WIDEST_HEAD = 256  # numbers of the widest head whose tiles need no care


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

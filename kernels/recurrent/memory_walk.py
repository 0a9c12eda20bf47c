"""The walk of the torch twins through a step: single tokens together, then each sequence's tokens chunk by chunk."""

# T tokens of the step · N tokens that are computed together · H heads · K numbers of a key · V numbers of a value
# S state slots

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lorafleet.kernels.recurrent.recurrent_batch import CHUNK, RecurrentBatch


def walk_memories(
    out_THV: Tensor,
    memory_SHKV: Tensor,
    batch: RecurrentBatch,
    one_token: Callable[[Tensor, Tensor], Tensor],
    one_chunk: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Fills out and advances the memories in place. Returns out.

    Args:
        one_token: Takes rows of the step, one for each of N sequences, and their memories [N, H, K, V], which it
            advances in place. Returns [N, H, V].
        one_chunk: Takes N rows of one sequence, and its memory [H, K, V]. Returns [N, H, V] and the next memory.
    """
    if singles := batch.singles():
        b_N = torch.tensor(singles, device=out_THV.device)
        rows_N = batch.start_B[b_N].long()
        memory_NHKV = batch.read(memory_SHKV, b_N)
        out_THV[rows_N] = one_token(rows_N, memory_NHKV).to(out_THV.dtype)
        batch.write(memory_SHKV, memory_NHKV, b_N)
        batch.keep(memory_SHKV, rows_N.tolist(), memory_NHKV)
    for b, span in batch.spans():
        own = slice(b, b + 1)
        memory_HKV = batch.read(memory_SHKV, own)[0]
        size = 1 if batch.keeps(span) else CHUNK  # A chunk has no states but the last.
        for start in range(span.start, span.stop, size):
            rows = slice(start, min(start + size, span.stop))
            out_NHV, memory_HKV = one_chunk(rows, memory_HKV)
            out_THV[rows] = out_NHV.to(out_THV.dtype)
            if size == 1:
                batch.keep(memory_SHKV, [start], memory_HKV[None])
        batch.write(memory_SHKV, memory_HKV[None], own)
    return out_THV

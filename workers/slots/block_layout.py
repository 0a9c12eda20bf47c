"""Decides where each matrix of an adapter lies in its block of host memory.

Each packed linear has its slices' A one right after another, and then each slice's B. A slot has the same layout.
"""

# L packed linears · A addresses of a packed linear · P slices

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lorafleet.kernels.lora.packed_lora import AdapterTable, bytes_of_a
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.slots.extra_block import aligned


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of A [rows, inputs] and B [outputs, rank] on one rank, and their scaling."""

    rows: int
    inputs: int
    outputs: int
    rank: int
    scaling: float


def lay_out(linears: Sequence[Sequence[PairSizes | None]], dtype: torch.dtype) -> tuple[AdapterTable, int]:
    """Returns the table of the places, and the bytes that all need.

    Args:
        linears: For each packed linear, the sizes of each slice; None for slices that the adapter leaves alone.
    """
    table = AdapterTable.empty(len(linears))
    end = 0
    for i, slices in yielding_gil(enumerate(linears)):
        present = [s for s in slices if s is not None]
        if not present:
            continue
        table.offset_LA[i, 0] = end
        end = aligned(end + bytes_of_a(sum(s.rows for s in present), present[0].inputs, dtype))
        for p, s in enumerate(slices):
            if s is not None:
                table.offset_LA[i, 1 + p] = end
                table.rank_LP[i, p], table.scale_LP[i, p] = s.rank, s.scaling
                end = aligned(end + s.outputs * s.rank * dtype.itemsize)
    return table, end


def pair_offsets(
    offsets: Sequence[int], slices: Iterable[PairSizes | None], itemsize: int
) -> Iterator[tuple[int, int] | None]:
    """Yields the offsets of each slice's A and B, or None for a slice that the adapter leaves alone.

    Args:
        offsets: The linear's row of AdapterTable.offset_LA.
        itemsize: Bytes of a number.
    """
    a_offset = offsets[0]
    for s, b_offset in zip(slices, offsets[1:], strict=False):
        if s is None:
            yield None
            continue
        yield a_offset, b_offset
        a_offset += s.rows * s.inputs * itemsize

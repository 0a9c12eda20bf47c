"""Decides where each matrix of an adapter lies in its block of host memory, and lets plain adapters be read there.

Each packed linear has its slices' A one right after another, and then each slice's B. A slot has the same layout.

Most adapters are served as they lie in the file: nothing is computed from their A and B, and nothing is rounded. Then
the places of all matrices follow from the file's header. Reading them there saves a copy of the whole adapter, and half
of the memory that a load needs.
"""

# L packed linears · A addresses of a packed linear · P slices

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import AdapterTable, bytes_of_a
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.adapter_parts import AdapterParts
from lorafleet.workers.adapters.kinds import lora
from lorafleet.workers.adapters.kinds.kind import Target
from lorafleet.workers.adapters.weight_files import FLOAT_DTYPES, ReadTargets
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.extra_block import aligned
from lorafleet.workers.slots.layer_weights import LoRALayerWeights, PairSizes


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


def read_targets(
    adapter: AdapterParts, base: BaseParts, dtype: torch.dtype, allocate: Callable[[int], Tensor]
) -> ReadTargets | None:
    """Returns the place of each A and B that is served as it lies in the file, or None if there may be none.

    It is a guess, which is_in_place() has to confirm.

    Args:
        base: The base of a replica with one rank.
        dtype: The serving dtype.
        allocate: Returns a uint8 tensor of the given number of bytes.
    """
    if adapter.kind is not lora.LORA or not lora.keeps_pairs(adapter.helper):
        return None
    targets = {target.module: target for target in adapter.targets if _is_served_as_stored(target, dtype)}
    linears = [[targets.get(name) for name in part.names] for part in base.linears]
    sizes = [[None if target is None else _sizes(target) for target in slices] for slices in linears]
    table, num_bytes = lay_out(sizes, dtype)
    if num_bytes == 0:
        return None
    places: dict[str, tuple[int, int]] = {}  # start and end
    for row, slices, sizes_of in zip(table.offset_LA.tolist(), linears, sizes, strict=True):
        for target, offsets in zip(slices, pair_offsets(row, sizes_of, dtype.itemsize), strict=True):
            if target is None or offsets is None:
                continue
            for leaf, offset in zip((lora.A, lora.B), offsets, strict=True):
                name = target.tensors[leaf]
                info = target.infos[name]
                places[name] = offset, offset + info.end - info.start
    block = allocate(num_bytes)
    for (_, end), (start, _) in pairwise([*sorted(places.values()), (num_bytes, num_bytes)]):
        if end < start:
            block[end:start] = 0
    return ReadTargets(block, {name: start for name, (start, _) in places.items()})


def is_in_place(
    block: Tensor, table: AdapterTable, num_bytes: int, linears: Sequence[Sequence[LoRALayerWeights | None]]
) -> bool:
    """Returns whether the block has exactly these matrices, each where the table says."""
    if len(block) != num_bytes:
        return False
    start = block.data_ptr()
    for row, slices in zip(table.offset_LA.tolist(), linears, strict=True):
        sizes = [None if layer is None else layer.sizes for layer in slices]
        itemsize = next((layer.a_RD.itemsize for layer in slices if layer is not None), 0)
        for layer, offsets in zip(slices, pair_offsets(row, sizes, itemsize), strict=True):
            if layer is None or offsets is None:
                continue
            for matrix, offset in zip((layer.a_RD, layer.b_OR), offsets, strict=True):
                if matrix.data_ptr() != start + offset or not matrix.is_contiguous():
                    return False
    return True


def _is_served_as_stored(target: Target, dtype: torch.dtype) -> bool:
    return all(
        target.has(leaf) and FLOAT_DTYPES.get(target.infos[target.tensors[leaf]].dtype) is dtype
        for leaf in (lora.A, lora.B)
    )


def _sizes(target: Target) -> PairSizes:
    (rows, inputs), (outputs, rank) = target.shape_of(lora.A), target.shape_of(lora.B)
    return PairSizes(rows, inputs, outputs, rank, 1.0)  # the scaling is not used

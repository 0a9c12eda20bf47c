"""Lets a plain adapter be read from its file right into the block that its slot is filled from.

Most adapters are served as they lie in the file: nothing is computed from their A and B, and nothing is rounded. Then
the places of all matrices in the block (block_layout.py) follow from the file's header. Reading them there saves a
copy of the whole adapter, and half of the memory that a load needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import AdapterTable
from lorafleet.workers.adapters.adapter_parts import AdapterParts
from lorafleet.workers.adapters.kinds import lora
from lorafleet.workers.adapters.kinds.kind import Target
from lorafleet.workers.adapters.weight_files import FLOAT_DTYPES, Placement
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.block_layout import PairSizes, lay_out, pair_offsets
from lorafleet.workers.slots.layer_weights import LoRALayerWeights


def placement(
    adapter: AdapterParts, base: BaseParts, dtype: torch.dtype, allocate: Callable[[int], Tensor]
) -> Placement | None:
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
    block = allocate(num_bytes)
    by_name = {}
    for row, slices, sizes_of in zip(table.offset_LA.tolist(), linears, sizes, strict=True):
        for target, offsets in zip(slices, pair_offsets(row, sizes_of, dtype.itemsize), strict=True):
            if target is None or offsets is None:
                continue
            for leaf, offset in zip((lora.A, lora.B), offsets, strict=True):
                name = target.tensors[leaf]
                info = target.infos[name]
                by_name[name] = block[offset : offset + info.end - info.start]
    return Placement(block, by_name)


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

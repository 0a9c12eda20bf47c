"""One adapter in the serving layout: a single block of bytes for all its matrices, so that a slot is one copy.

Lives in host memory (pinned where there is a GPU) as the CPU tier's entry. On a CPU the slots use it in place.
"""

# L packed linears · P slices

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.packed_lora import AdapterTable, SlotWeights
from lorafleet.workers.lora.giving_way import giving_way
from lorafleet.workers.lora.layer_weights import LoRALayerWeights
from lorafleet.workers.lora.model import LoRAModel
from lorafleet.workers.lora.request import AdapterInfo

ALIGNMENT = 256  # bytes; what the GPU's allocator gives, so that kernels may load 16 bytes at a time


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds, one after the other. read: with the digest. check: names, shapes, values. pack: with the casts."""

    read_s: float
    check_s: float
    pack_s: float


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """block: uint8. table: where each packed linear's matrices begin in it."""

    info: AdapterInfo
    block: Tensor
    dtype: torch.dtype
    table: AdapterTable
    times: LoadTimes

    def weights(self, linear: int, in_features: int, out_features: Sequence[int]) -> SlotWeights | None:
        """Views of the block; None where the adapter has nothing for the linear."""
        offsets, ranks = self.table.offset_LA[linear].tolist(), self.table.rank_LP[linear].tolist()
        if offsets[0] < 0:
            return None
        b = tuple(
            self._matrix(offset, out, rank) if rank else None
            for offset, out, rank in zip(offsets[1:], out_features, ranks, strict=False)
        )
        scales = tuple(self.table.scale_LP[linear, : len(out_features)].tolist())
        return SlotWeights(self._matrix(offsets[0], sum(ranks), in_features), b, scales)

    def _matrix(self, offset: int, rows: int, columns: int) -> Tensor:
        size = rows * columns * self.dtype.itemsize
        return self.block[offset : offset + size].view(self.dtype).view(rows, columns)


def pack(
    model: LoRAModel,
    packed_names: Sequence[tuple[str, ...]],
    dtype: torch.dtype,
    allocate: Callable[[int], Tensor],
) -> PackedAdapter:
    """packed_names: the module paths of each packed linear's projections. allocate: uint8 of so many bytes."""
    started = time.perf_counter()
    linears = [[model.modules.get(name) for name in names] for names in packed_names]
    table, size = _lay_out(linears, dtype)
    block = allocate(size)
    _fill(block, table, linears)
    info = AdapterInfo(digest=model.digest, rank=model.rank, num_bytes=size, target_modules=model.target_modules)
    times = LoadTimes(model.read_s, model.check_s, time.perf_counter() - started)
    return PackedAdapter(info, block, dtype, table, times)


def slot_bytes(packed_shapes: Sequence[tuple[int, tuple[int, ...]]], rank: int, dtype: torch.dtype) -> int:
    """The most that one adapter of this rank on every projection can need."""
    end = 0
    for in_features, out_features in packed_shapes:
        end = _aligned(end + len(out_features) * rank * in_features * dtype.itemsize)
        for out in out_features:
            end = _aligned(end + rank * out * dtype.itemsize)
    return end


def _lay_out(linears: Sequence[list[LoRALayerWeights | None]], dtype: torch.dtype) -> tuple[AdapterTable, int]:
    """For each linear the slices' A, stacked, then each slice's B. Returns the bytes they need as well."""
    table = AdapterTable.empty(len(linears))
    end = 0
    for i, slices in giving_way(enumerate(linears)):
        present = [s for s in slices if s is not None]
        if not present:
            continue
        table.offset_LA[i, 0] = end
        end = _aligned(end + sum(s.a_RD.numel() for s in present) * dtype.itemsize)
        for p, s in enumerate(slices):
            if s is not None:
                table.offset_LA[i, 1 + p] = end
                table.rank_LP[i, p], table.scale_LP[i, p] = s.rank, s.scaling
                end = _aligned(end + s.b_OR.numel() * dtype.itemsize)
    return table, end


def _fill(block: Tensor, table: AdapterTable, linears: Sequence[list[LoRALayerWeights | None]]) -> None:
    """By numpy: torch would split each copy over its thread pool, see casting.py."""
    target = block.numpy()
    for offsets, slices in zip(table.offset_LA.tolist(), linears, strict=True):
        a_end = offsets[0]
        for b_start, s in zip(offsets[1:], slices, strict=False):
            if s is not None:
                a, b = s.a_RD.view(-1).view(torch.uint8).numpy(), s.b_OR.view(-1).view(torch.uint8).numpy()
                target[a_end : a_end + a.size] = a
                target[b_start : b_start + b.size] = b
                a_end += a.size


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

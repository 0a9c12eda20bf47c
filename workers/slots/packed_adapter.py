"""Packs one adapter in the serving layout.

All its A and B matrices are in a single block of bytes, so that filling a slot is one copy. Matrices that were read
right into their places (block_layout.py) are not copied. Everything else is in a second block (extra_block.py). Both
lie in host memory, pinned if there is a GPU, as the CPU tier's entry. On a CPU the slots use them in place.
"""

# L packed linears · P slices

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_layout import UNDIVIDED, LoRALayout
from lorafleet.kernels.lora.packed_lora import (
    SCALES_ALIGNMENT,
    AdapterTable,
    PackedLoRA,
    SlotWeights,
    bytes_of_a,
    scales_offset,
)
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.adapters.parallel_reading import ForEach, in_turn
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.block_layout import is_in_place, lay_out
from lorafleet.workers.slots.classifier_extras import classifier_tensors
from lorafleet.workers.slots.extra_block import ExtraBlock, Extras, aligned, copy_into
from lorafleet.workers.slots.layer_weights import LoRALayerWeights
from lorafleet.workers.slots.linear_extra_parts import extra_tensors
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.vocab_extras import vocab_tensors

LINEARS_AT_ONCE = 16  # copied by one thread in turn, some megabytes

Slices = list[LoRALayerWeights | None]
LinearsWithOffsets = Sequence[tuple[list[int], Slices]]


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Durations of a load's phases in seconds."""

    read_s: float  # reading the values
    check_s: float  # checking names, shapes and values, and casting
    pack_s: float  # packing into blocks
    digest_s: float = 0.0  # waiting for the digest after that
    fetch_s: float = 0.0  # until the files were on this node; 0 if they already were


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """One adapter in the serving layout."""

    info: AdapterInfo
    block: Tensor  # uint8, this rank's part
    dtype: torch.dtype
    table: AdapterTable  # where each packed linear's matrices begin in the block
    times: LoadTimes
    extra: ExtraBlock | None = None  # None if the adapter has only A and B
    rope: RopeConfig | None = None  # of its tokens; None if it is the base's
    draft: PackedAdapter | None = None  # its draft LoRA for the draft model; None if there is none
    # The offset in bytes of each matrix in the block, ascending, then the end of the block. All ranks have the same
    # matrices, though of different sizes.
    cuts: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        offsets = self.table.offset_LA
        object.__setattr__(self, "cuts", [*offsets[offsets >= 0].tolist(), self.block.numel()])

    @property
    def blocks(self) -> list[Tensor]:
        """All blocks of host memory that are not empty."""
        blocks = [self.block] if self.extra is None else [self.block, self.extra.block]
        return [block for block in blocks if block.numel()]

    @property
    def extra_bytes(self) -> int:
        return 0 if self.extra is None else self.extra.num_bytes

    def weights(
        self, linear: int, in_features: int, out_features: Sequence[int], layout: LoRALayout = UNDIVIDED
    ) -> SlotWeights | None:
        """Returns views of the block, or None if the adapter has nothing for the linear."""
        offsets, ranks = self.table.offset_LA[linear].tolist(), self.table.rank_LP[linear].tolist()
        if offsets[0] < 0:
            return None
        b = tuple(
            self._matrix(offset, out, rank) if rank else None
            for offset, out, rank in zip(offsets[1:], out_features, ranks, strict=False)
        )
        scales = tuple(self.table.scale_LP[linear, : len(out_features)].tolist())
        rows = sum(map(layout.num_rows, ranks))
        a_RD = self._matrix(offsets[0], rows, in_features)
        return SlotWeights(a_RD, b, scales, self._row_scale(offsets[0], rows, in_features))

    def _matrix(self, offset: int, rows: int, columns: int) -> Tensor:
        size = rows * columns * self.dtype.itemsize
        return self.block[offset : offset + size].view(self.dtype).view(rows, columns)

    def _row_scale(self, offset: int, rows: int, in_features: int) -> Tensor | None:
        if self.dtype != FP8:
            return None
        start, end = offset + scales_offset(rows, in_features), offset + bytes_of_a(rows, in_features, FP8)
        return self.block[start:end].view(torch.float32)


def pack(
    model: LoRAModel,
    base: BaseParts,
    dtype: torch.dtype,
    allocate: Callable[[int], Tensor],
    check_size: Callable[[int, int], None] | None = None,
    for_each: ForEach = in_turn,
) -> PackedAdapter:
    """Packs one rank's part of an adapter, whose digest is confirmed when this returns.

    Args:
        allocate: Returns a uint8 tensor of the given number of bytes.
        check_size: Raises if A and B, or the extras, need more bytes than allowed. It is called with both numbers.
        for_each: Calls a function for each of several parts of the work, perhaps in threads.
    """
    started = time.perf_counter()
    linears = [[model.modules.get(name) for name in part.names] for part in base.linears]
    extras: Extras = {
        **extra_tensors(model, base),
        **vocab_tensors(model.embedding, model.head),
        **classifier_tensors(model.classifier),
    }
    table, size = lay_out([[None if s is None else s.sizes for s in slices] for slices in linears], dtype)
    if check_size is not None:
        with model.content.confirmed_first():
            check_size(size, ExtraBlock.size_of(extras))
    if model.block is not None and is_in_place(model.block, table, size, linears):
        block = model.block
    else:
        block = allocate(size)
        work = list(zip(table.offset_LA.tolist(), linears, strict=True))
        parts = [work[start : start + LINEARS_AT_ONCE] for start in range(0, len(work), LINEARS_AT_ONCE)]
        for_each(lambda part: _fill(block, part), parts)
    extra = ExtraBlock.of(extras, allocate, for_each) if extras else None
    packed = time.perf_counter()
    info = AdapterInfo(
        model.digest,
        model.rank,
        model.num_bytes,
        model.target_modules,
        model.invocation_tokens,
        model.vocab_size,
        model.language,
        model.own_rope.context_length,
        "" if model.classifier is None else model.classifier.task,
        model.left_out,
    )
    times = LoadTimes(model.read_s, model.check_s, packed - started, time.perf_counter() - packed)
    return PackedAdapter(info, block, dtype, table, times, extra, model.own_rope.rope)


def slot_bytes(linears: Sequence[PackedLoRA], rank: int, dtype: torch.dtype) -> int:
    """Returns the most bytes that an adapter of up to this rank on every projection can need here."""
    end = 0
    for linear in linears:
        # This is the largest part, not this rank's own part of exactly that LoRA rank: a smaller one may divide
        # differently.
        rows = len(linear.out_features) * linear.layout.columns(rank)
        end = aligned(end + bytes_of_a(rows, linear.in_features, dtype))
        for out in linear.out_features:
            end = aligned(end + rank * out * dtype.itemsize)
    return end


def _fill(block: Tensor, part: LinearsWithOffsets) -> None:
    """Copies some linears' matrices into the block, each to its row of AdapterTable.offset_LA."""
    for offsets, slices in part:
        present = [(s, b_start) for s, b_start in zip(slices, offsets[1:], strict=False) if s is not None]
        a_end = offsets[0]
        for s, b_start in present:
            a_end = copy_into(block, a_end, s.a_RD)
            copy_into(block, b_start, s.b_OR)
        scale_end = -(-a_end // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
        for s, _ in present:
            if s.row_scale_R is not None:
                scale_end = copy_into(block, scale_end, s.row_scale_R)

"""Storage of each slot's A and B, for every packed linear of the model.

A packed linear is one base GEMM that serves several named projections ("slices"): q, k, v or gate, up. The linears o
and down have one slice each. A slot's A for a packed linear stacks the slices' A by rows, [sum of ranks, in]. Each
slice has its own B, [out, rank], so an adapter takes the memory of its own ranks, without padding. The tables give the
Triton kernels the addresses in device memory. The torch twin takes the same matrices as tensors.

FP8: A and B are e4m3. Each rank's row of A and column of B has its own scale. Only the product of the two scales
matters, so there is one float32 for each row of A. These scales lie right behind A, so that A's address leads to them.
"""

# L packed linears · S slots · P slices (at most MAX_SLICES) · A addresses, 1 + P · R rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.extras.extra_tables import ExtraTables
from lorafleet.kernels.extras.linear_extras import LinearExtras
from lorafleet.kernels.lora.lora_layout import UNDIVIDED, LoRALayout
from lorafleet.kernels.quant.fp8 import FP8

MAX_SLICES = 3
SCALES_ALIGNMENT = 16  # bytes, counted from A's beginning; lora_shrink.py relies on it

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter's weights on one packed linear.

    All tensors are contiguous, of the serving dtype, and on the serving device.
    """

    a_RD: Tensor  # the slices' A in slice order; of each, the rows that LoRALayout.rows gives this rank
    b: tuple[Tensor | None, ...]  # each slice's [out_p, r_p]; None if the adapter leaves the slice alone
    scales: tuple[float, ...]  # each slice's alpha/r (or alpha/sqrt(r)), applied in fp32 between A and B
    row_scale_R: Tensor | None = None  # float32, FP8 only; a row's product with x is multiplied by it as well

    def __post_init__(self) -> None:
        assert (self.a_RD.dtype == FP8) == (self.row_scale_R is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(0 if b is None else b.shape[1] for b in self.b)

    def scale(self, p: int, rows: slice) -> float | Tensor:
        """Returns slice p's scale in the form in which its rows of A need it."""
        return self.scales[p] if self.row_scale_R is None else self.scales[p] * self.row_scale_R[rows]


def scales_offset(rows: int, in_features: int) -> int:
    """Returns the number of bytes from the beginning of an FP8 A to its scales."""
    return -(-rows * in_features // SCALES_ALIGNMENT) * SCALES_ALIGNMENT


def bytes_of_a(rows: int, in_features: int, dtype: torch.dtype) -> int:
    """Returns the size of A in bytes, including the scales if it is FP8."""
    if dtype != FP8:
        return rows * in_features * dtype.itemsize
    return scales_offset(rows, in_features) + rows * torch.float32.itemsize


def with_scales_behind(a_RD: Tensor, row_scale_R: Tensor) -> tuple[Tensor, Tensor]:
    """Copies an FP8 A and its scales into the memory layout that the kernels expect, and returns both copies."""
    block = torch.empty(bytes_of_a(len(a_RD), a_RD.shape[1], FP8), dtype=torch.uint8, device=a_RD.device)
    own_RD = block[: a_RD.numel()].view(FP8).view(a_RD.shape)
    own_R = block[scales_offset(*a_RD.shape) :].view(torch.float32)
    return own_RD.copy_(a_RD), own_R.copy_(row_scale_R)


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """The location of one adapter's matrices on every packed linear."""

    offset_LA: Int64s  # bytes from the adapter's beginning to A, then to each slice's B; -1 if it has none
    rank_LP: Int32s  # ranks of B, however A is divided; 0 if the adapter leaves the slice alone
    scale_LP: Float32s

    @classmethod
    def empty(cls, num_linears: int) -> AdapterTable:
        return cls(
            np.full((num_linears, 1 + MAX_SLICES), -1, np.int64),
            np.zeros((num_linears, MAX_SLICES), np.int32),
            np.zeros((num_linears, MAX_SLICES), np.float32),
        )

    @classmethod
    def of(cls, weights: Sequence[SlotWeights | None]) -> AdapterTable:
        """Makes a table of matrices that lie anywhere in memory. The offsets are counted from address 0."""
        table = cls.empty(len(weights))
        for i, w in enumerate(weights):
            if w is None:
                continue
            table.offset_LA[i, 0] = w.a_RD.data_ptr()
            if w.row_scale_R is not None:
                assert w.row_scale_R.data_ptr() == w.a_RD.data_ptr() + scales_offset(*w.a_RD.shape)
            for p, (b, scale) in enumerate(zip(w.b, w.scales, strict=True)):
                if b is not None:
                    table.offset_LA[i, 1 + p] = b.data_ptr()
                    table.rank_LP[i, p], table.scale_LP[i, p] = b.shape[1], scale
        return table


class LoRATables:
    """The device tables of all packed linears. A slot that was never written has rank 0 everywhere."""

    def __init__(
        self, num_linears: int, max_loras: int, device: torch.device, num_norms: int = 0, num_mixtures: int = 0
    ) -> None:
        # The adapters' data besides A and B.
        self.extras = ExtraTables(num_linears, num_norms, max_loras, device, num_mixtures)
        shape = (num_linears, max_loras)
        # Pointers to A, then to each slice's B; 0 if it is absent.
        self.address_LSA = torch.zeros(*shape, 1 + MAX_SLICES, dtype=torch.int64, device=device)
        self.rank_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.int32, device=device)
        self.scale_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.float32, device=device)
        self.num_writes = 0
        self.total_rank_SL: list[list[int]] = [[0] * num_linears for _ in range(max_loras)]  # a copy on the host

    def write_slot(self, slot: int, table: AdapterTable, address_LA: Int64s | None = None) -> None:
        """Writes an adapter's table into the slot's rows of the device tables.

        address_LA has the addresses of the adapter's matrices, 0 where it has none. If it is None, the table's offsets
        are the addresses.

        This is one copy on the current stream, and the host does not wait for it.
        """
        num_linears = len(table.offset_LA)
        addresses = table.offset_LA.clip(min=0) if address_LA is None else address_LA
        assert addresses.shape == table.offset_LA.shape
        device = self.address_LSA.device
        ends = np.cumsum([table.offset_LA.nbytes, table.rank_LP.nbytes, table.scale_LP.nbytes])
        host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        row = host.numpy()
        row[: ends[0]].view(np.int64)[:] = addresses.reshape(-1)
        row[ends[0] : ends[1]].view(np.int32)[:] = table.rank_LP.reshape(-1)
        row[ends[1] :].view(np.float32)[:] = table.scale_LP.reshape(-1)
        staged = host.to(device, non_blocking=True)
        self.address_LSA[:, slot] = staged[: ends[0]].view(torch.int64).view(num_linears, -1)
        self.rank_LSP[:, slot] = staged[ends[0] : ends[1]].view(torch.int32).view(num_linears, -1)
        self.scale_LSP[:, slot] = staged[ends[1] :].view(torch.float32).view(num_linears, -1)
        self.total_rank_SL[slot] = table.rank_LP.sum(axis=1).tolist()
        self.num_writes += 1


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """The position of a rank's part of a packed linear within the whole linear."""

    first_input: int  # where the rank's inputs begin
    # For each slice, the ranges of outputs that the rank has, side by side. A projection that is fused of several has
    # more than one.
    outputs: tuple[tuple[slice, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """The number of outputs of each slice."""
        return [sum(own.stop - own.start for own in ranges) for ranges in self.outputs]


class PackedLoRA:
    """The slots of one packed linear: a row of the tables for the Triton kernels, and tensors for the torch twin.

    in_features and out_features are those of A and B on this rank. If `place` is None, this rank has the whole linear.
    """

    def __init__(
        self,
        index: int,
        in_features: int,
        out_features: tuple[int, ...],
        tables: LoRATables,
        layout: LoRALayout = UNDIVIDED,
        place: LinearPlace | None = None,
    ) -> None:
        assert 1 <= len(out_features) <= MAX_SLICES
        self.layout = layout
        self.tables = tables
        self.index = index  # row of the tables
        self.in_features = in_features
        self.out_features = out_features
        self.dtype: torch.dtype | None = None  # dtype of A and B in all slots; None until a slot is set
        self.place = place or LinearPlace(0, tuple((slice(0, out),) for out in out_features))
        self.slots: list[SlotWeights | None] = [None] * tables.rank_LSP.shape[1]
        self.extras: list[LinearExtras | None] = [None] * tables.rank_LSP.shape[1]  # for the torch twin
        self._stacked: tuple[tuple[int, ...], StackedSlots | None] = ((), None)
        self._max_total_rank: tuple[tuple[int, ...], int, int] = ((), 0, 0)

    def set_slot(self, slot: int, weights: SlotWeights | None) -> None:
        """Sets a slot's tensors for the torch twin.

        LoRATables.write_slot writes the device tables, for the whole model at once.
        """
        if weights is not None:
            self.dtype = weights.a_RD.dtype
            assert weights.a_RD.shape == (sum(map(self.layout.num_rows, weights.ranks)), self.in_features)
            assert all(b is None or b.shape[0] == o for b, o in zip(weights.b, self.out_features, strict=True))
        self.slots[slot] = weights
        self._stacked = ((), None)

    def part_of(self, y_TO: Tensor) -> Tensor:
        """Returns the columns of the base linear's output that this rank's B computes."""
        return y_TO.narrow(1, self.layout.first_column, sum(self.out_features))

    def max_total_rank(self, slots: tuple[int, ...]) -> int:
        """Returns the largest total rank of any of the slots, according to the tables.

        The result is cached until the tables or the set of slots change: walking 64 slots for each linear costs 1 ms a
        step.
        """
        key = (slots, self.tables.num_writes)
        if self._max_total_rank[:2] != key:
            self._max_total_rank = (*key, max((self.tables.total_rank_SL[s][self.index] for s in slots), default=0))
        return self._max_total_rank[2]

    def stacked(self, slots: tuple[int, ...]) -> StackedSlots | None:
        """Returns the slots' weights side by side. They are cached until the set of slots or a slot's content
        changes."""
        if self._stacked[0] != slots:
            self._stacked = (slots, StackedSlots.build(self, slots))
        return self._stacked[1]


@dataclass(frozen=True, slots=True)
class StackedSlots:
    """All of a step's adapters on one linear as one wide adapter, for the torch twin's few-token path."""

    # [in, C]: C is the sum of LoRALayout.columns over all adapters and slices. Columns that this rank's part does not
    # fill are zero.
    a_DC: Tensor
    b_CO: Tensor  # [parts * C, out]; zero in the output columns of other slices than the row's own
    # [N + 1, C]: row i has the scale in active slot i's columns, as far as this rank's part fills them, and zero
    # elsewhere. Row N (the base) is zero.
    scale_NC: Tensor

    @classmethod
    def build(cls, packed: PackedLoRA, slots: tuple[int, ...]) -> StackedSlots | None:
        """Stacks the weights of the slots; returns None if none has any. FP8 weights become float32."""
        present = [(i, w) for i, s in enumerate(slots) if (w := packed.slots[s]) is not None]
        if not present:
            return None
        layout, parts = packed.layout, packed.layout.num_parts
        columns = sum(layout.columns(rank) for _, w in present for rank in w.ranks)
        like = present[0][1].a_RD
        dtype = torch.float32 if like.dtype == FP8 else like.dtype
        a_CD = like.new_zeros(columns, packed.in_features, dtype=dtype)
        b_NCO = like.new_zeros(parts, columns, sum(packed.out_features), dtype=dtype)
        scale_NC = torch.zeros(len(slots) + 1, columns, dtype=torch.float32, device=like.device)
        first = 0
        for i, w in present:
            a_first = column = 0
            for p, (b, rank, out) in enumerate(zip(w.b, w.ranks, packed.out_features, strict=True)):
                rows = layout.num_rows(rank)
                own = slice(a_first, a_first + rows)
                a_CD[first : first + rows] = w.a_RD[own]
                scale_NC[i, first : first + rows] = w.scale(p, own)
                a_first += rows
                for part in range(parts if b is not None else 0):
                    assert b is not None
                    b_RO = b[:, layout.rows(rank, part)].T
                    b_NCO[part, first : first + len(b_RO), column : column + out] = b_RO
                first += layout.columns(rank)
                column += out
        return cls(a_CD.T.contiguous(), b_NCO.view(parts * columns, -1), scale_NC.to(dtype))

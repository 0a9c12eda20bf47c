"""Where each slot's A and B lie, for every packed linear of the model.

A packed linear is one base GEMM that serves several named projections ("slices"): q, k, v or gate, up; o and down have
one. A slot's A for it is the slices' A stacked by rows, [sum of ranks, in]; each slice keeps its own B, [out, rank], so
that an adapter costs its own ranks and no padding. The tables tell the Triton kernels where they are in device memory;
the torch twin takes them as tensors.

FP8: A and B are e4m3, each rank's row of A and column of B with a scale of its own. Only the two scales' product
matters, one float32 a row of A; these lie right behind A, so that A's address finds them.
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
SCALES_ALIGNMENT = 16  # bytes from A's beginning; lora_shrink.py knows it

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter on one packed linear. All tensors contiguous, of the serving dtype, on the serving device.

    a_RD: the slices' A, stacked in slice order; of each the rows that LoRALayout.rows gives this rank. b: each slice's
    [out_p, r_p], None where the adapter leaves the slice alone. scales: alpha/r (or alpha/sqrt(r)) of each slice,
    applied in fp32 between A and B. row_scale_R: float32, of FP8 weights only; a row's product with x is multiplied by
    it as well.
    """

    a_RD: Tensor
    b: tuple[Tensor | None, ...]
    scales: tuple[float, ...]
    row_scale_R: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.a_RD.dtype == FP8) == (self.row_scale_R is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(0 if b is None else b.shape[1] for b in self.b)

    def scale(self, p: int, rows: slice) -> float | Tensor:
        """Slice p's, as its rows of A want it."""
        return self.scales[p] if self.row_scale_R is None else self.scales[p] * self.row_scale_R[rows]


def scales_offset(rows: int, in_features: int) -> int:
    """Bytes from an FP8 A to its scales."""
    return -(-rows * in_features // SCALES_ALIGNMENT) * SCALES_ALIGNMENT


def bytes_of_a(rows: int, in_features: int, dtype: torch.dtype) -> int:
    """With the scales."""
    if dtype != FP8:
        return rows * in_features * dtype.itemsize
    return scales_offset(rows, in_features) + rows * torch.float32.itemsize


def with_scales_behind(a_RD: Tensor, row_scale_R: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of an FP8 A and its scales, in the memory layout that the kernels know."""
    block = torch.empty(bytes_of_a(len(a_RD), a_RD.shape[1], FP8), dtype=torch.uint8, device=a_RD.device)
    own_RD = block[: a_RD.numel()].view(FP8).view(a_RD.shape)
    own_R = block[scales_offset(*a_RD.shape) :].view(torch.float32)
    return own_RD.copy_(a_RD), own_R.copy_(row_scale_R)


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """One adapter on every packed linear. offset_LA: bytes from where the adapter begins to A, then to each slice's B;
    -1 where it has none. Rank 0: the adapter leaves the slice alone. Ranks are B's, however A is divided."""

    offset_LA: Int64s
    rank_LP: Int32s
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
        """Of matrices that lie anywhere: offsets from address 0."""
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
    """Device tables of all packed linears. address_LSA int64: pointers to A, then to each slice's B (0: absent);
    rank_LSP int32; scale_LSP float32. A slot that was never written has rank 0 everywhere. extras: what adapters have
    besides."""

    def __init__(
        self, num_linears: int, max_loras: int, device: torch.device, num_norms: int = 0, num_mixtures: int = 0
    ) -> None:
        self.extras = ExtraTables(num_linears, num_norms, max_loras, device, num_mixtures)
        shape = (num_linears, max_loras)
        self.address_LSA = torch.zeros(*shape, 1 + MAX_SLICES, dtype=torch.int64, device=device)
        self.rank_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.int32, device=device)
        self.scale_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.float32, device=device)
        self.num_writes = 0
        self.total_rank_SL: list[list[int]] = [[0] * num_linears for _ in range(max_loras)]  # the host's own copy

    def write_slot(self, slot: int, table: AdapterTable, address: int = 0) -> None:
        """address: where the adapter begins. One copy, on the current stream, which the host does not wait for."""
        num_linears = len(table.offset_LA)
        device = self.address_LSA.device
        ends = np.cumsum([table.offset_LA.nbytes, table.rank_LP.nbytes, table.scale_LP.nbytes])
        host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        row = host.numpy()
        row[: ends[0]].view(np.int64)[:] = np.where(table.offset_LA < 0, 0, table.offset_LA + address).reshape(-1)
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
    """Where a rank's part of a packed linear lies in the whole: its inputs begin at first_input; outputs: of each slice
    the ranges that it has, one behind the other. A projection that is fused of several has more than one."""

    first_input: int
    outputs: tuple[tuple[slice, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Outputs of each slice."""
        return [sum(own.stop - own.start for own in ranges) for ranges in self.outputs]


class PackedLoRA:
    """The slots of one packed linear: a row of the tables for the Triton kernels, tensors for the torch twin.

    in_features, out_features: of A and B as this rank holds them. place: None where the linear is whole here.
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
        self.dtype: torch.dtype | None = None  # of A and B; one for all slots, None before the first
        self.place = place or LinearPlace(0, tuple((slice(0, out),) for out in out_features))
        self.slots: list[SlotWeights | None] = [None] * tables.rank_LSP.shape[1]
        self.extras: list[LinearExtras | None] = [None] * tables.rank_LSP.shape[1]  # for the torch twin
        self._stacked: tuple[tuple[int, ...], StackedSlots | None] = ((), None)
        self._max_total_rank: tuple[tuple[int, ...], int, int] = ((), 0, 0)

    def set_slot(self, slot: int, weights: SlotWeights | None) -> None:
        """For the torch twin. The device tables are written for the whole model at once: LoRATables.write_slot."""
        if weights is not None:
            self.dtype = weights.a_RD.dtype
            assert weights.a_RD.shape == (sum(map(self.layout.num_rows, weights.ranks)), self.in_features)
            assert all(b is None or b.shape[0] == o for b, o in zip(weights.b, self.out_features, strict=True))
        self.slots[slot] = weights
        self._stacked = ((), None)

    def part_of(self, y_TO: Tensor) -> Tensor:
        """The columns of the base linear's output that this rank's B has."""
        return y_TO.narrow(1, self.layout.first_column, sum(self.out_features))

    def max_total_rank(self, slots: tuple[int, ...]) -> int:
        """By the tables. Kept until these or the set of slots change: walking 64 slots a linear costs 1 ms a step."""
        key = (slots, self.tables.num_writes)
        if self._max_total_rank[:2] != key:
            self._max_total_rank = (*key, max((self.tables.total_rank_SL[s][self.index] for s in slots), default=0))
        return self._max_total_rank[2]

    def stacked(self, slots: tuple[int, ...]) -> StackedSlots | None:
        """The slots' weights side by side; kept until the set of slots or a slot's content changes."""
        if self._stacked[0] != slots:
            self._stacked = (slots, StackedSlots.build(self, slots))
        return self._stacked[1]


@dataclass(frozen=True, slots=True)
class StackedSlots:
    """All of a step's adapters on one linear as one wide adapter, for the torch twin's few-token path.

    a_DC: [in, C], C the columns that this rank's part of all ranks has; zero where the part is short. b_CO: [parts * C,
    out], zero where a slice's columns are not the row's own. scale_NC: [N + 1, C], row i has the scale in active slot
    i's columns, as far as this rank's part fills them, and zero elsewhere; row N (base) is zero.
    """

    a_DC: Tensor
    b_CO: Tensor
    scale_NC: Tensor

    @classmethod
    def build(cls, packed: PackedLoRA, slots: tuple[int, ...]) -> StackedSlots | None:
        """Of FP8 weights in float32."""
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

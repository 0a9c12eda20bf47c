"""Where each slot's A and B lie, for every packed linear of the model.

A packed linear is one base GEMM that serves several named projections ("slices"): q, k, v or gate, up; o and down have
one. A slot's A for it is the slices' A stacked by rows, [sum of ranks, in]; each slice keeps its own B, [out, rank], so
that an adapter costs its own ranks and no padding. The tables tell the Triton kernels the same in device memory.
"""

# L packed linears · S slots · P slices (at most MAX_SLICES) · R rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SLICES = 3


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter on one packed linear. All tensors contiguous, of the serving dtype, on the serving device.

    a_RD: the slices' A, stacked in slice order. b: each slice's [out_p, r_p], None where the adapter leaves the slice
    alone. scales: alpha/r (or alpha/sqrt(r)) of each slice, applied in fp32 between A and B.
    """

    a_RD: Tensor
    b: tuple[Tensor | None, ...]
    scales: tuple[float, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(0 if b is None else b.shape[1] for b in self.b)

    @property
    def total_rank(self) -> int:
        return self.a_RD.shape[0]


class LoRATables:
    """Device tables of all packed linears. address_LSA int64: pointers to A, then to each slice's B (0: absent);
    rank_LSP int32; scale_LSP float32. A cleared slot has rank 0 everywhere."""

    def __init__(self, num_linears: int, max_loras: int, device: torch.device) -> None:
        shape = (num_linears, max_loras)
        self.address_LSA = torch.zeros(*shape, 1 + MAX_SLICES, dtype=torch.int64, device=device)
        self.rank_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.int32, device=device)
        self.scale_LSP = torch.zeros(*shape, MAX_SLICES, dtype=torch.float32, device=device)

    def write_slot(self, slot: int, weights: Sequence[SlotWeights | None]) -> None:
        """Three copies for the whole model, not three a linear."""
        address = torch.zeros(len(weights), 1 + MAX_SLICES, dtype=torch.int64)
        rank = torch.zeros(len(weights), MAX_SLICES, dtype=torch.int32)
        scale = torch.zeros(len(weights), MAX_SLICES, dtype=torch.float32)
        for i, w in enumerate(weights):
            if w is None:
                continue
            address[i, 0] = w.a_RD.data_ptr()
            for p, (b, s) in enumerate(zip(w.b, w.scales, strict=True)):
                if b is not None:
                    address[i, 1 + p], rank[i, p], scale[i, p] = b.data_ptr(), b.shape[1], s
        self.address_LSA[:, slot].copy_(address)
        self.rank_LSP[:, slot].copy_(rank)
        self.scale_LSP[:, slot].copy_(scale)


class PackedLoRA:
    """The slots of one packed linear: a row of the tables, and the same weights as tensors for the torch twin."""

    def __init__(self, index: int, in_features: int, out_features: tuple[int, ...], tables: LoRATables) -> None:
        assert 1 <= len(out_features) <= MAX_SLICES
        self.in_features = in_features
        self.out_features = out_features
        self.address_SA = tables.address_LSA[index]
        self.rank_SP = tables.rank_LSP[index]
        self.scale_SP = tables.scale_LSP[index]
        self.dtype: torch.dtype | None = None  # of A and B; one for all slots, None before the first
        self.slots: list[SlotWeights | None] = [None] * self.rank_SP.shape[0]
        self._stacked: tuple[tuple[int, ...], StackedSlots | None] = ((), None)
        self._max_total_rank: tuple[tuple[int, ...], int] = ((), 0)

    def set_slot(self, slot: int, weights: SlotWeights | None) -> None:
        """The device tables are written for the whole model at once: LoRATables.write_slot."""
        if weights is not None:
            self.dtype = weights.a_RD.dtype
            assert weights.a_RD.shape == (sum(weights.ranks), self.in_features)
            assert all(b is None or b.shape[0] == o for b, o in zip(weights.b, self.out_features, strict=True))
        self.slots[slot] = weights
        self._stacked = ((), None)
        self._max_total_rank = ((), 0)

    def max_total_rank(self, slots: tuple[int, ...]) -> int:
        """Kept until the set of slots or a slot's content changes: walking 64 slots a linear costs 1 ms a step."""
        if self._max_total_rank[0] != slots:
            ranks = (w.total_rank for s in slots if (w := self.slots[s]) is not None)
            self._max_total_rank = (slots, max(ranks, default=0))
        return self._max_total_rank[1]

    def stacked(self, slots: tuple[int, ...]) -> StackedSlots | None:
        """The slots' weights side by side; kept until the set of slots or a slot's content changes."""
        if self._stacked[0] != slots:
            self._stacked = (slots, StackedSlots.build(self, slots))
        return self._stacked[1]


@dataclass(frozen=True, slots=True)
class StackedSlots:
    """All of a step's adapters on one linear as one wide adapter, for the torch twin's few-token path.

    a_DC: [in, C], C the sum of all ranks. b_CO: [C, out], zero where a slice's columns are not the row's own.
    scale_NC: [N + 1, C], row i has the scale in active slot i's columns and zero elsewhere; row N (base) is zero.
    """

    a_DC: Tensor
    b_CO: Tensor
    scale_NC: Tensor

    @classmethod
    def build(cls, packed: PackedLoRA, slots: tuple[int, ...]) -> StackedSlots | None:
        present = [(i, w) for i, s in enumerate(slots) if (w := packed.slots[s]) is not None]
        if not present:
            return None
        a_CD = torch.cat([w.a_RD for _, w in present])
        b_CO = a_CD.new_zeros(a_CD.shape[0], sum(packed.out_features))
        scale_NC = torch.zeros(len(slots) + 1, a_CD.shape[0], dtype=torch.float32, device=a_CD.device)
        row = 0
        for i, w in present:
            column = 0
            for b, scale, out in zip(w.b, w.scales, packed.out_features, strict=True):
                if b is not None:
                    b_CO[row : row + b.shape[1], column : column + out] = b.T
                    scale_NC[i, row : row + b.shape[1]] = scale
                    row += b.shape[1]
                column += out
        return cls(a_CD.T.contiguous(), b_CO, scale_NC.to(a_CD.dtype))

"""Adapters on the experts of a mixture: each expert has an A and a B of its own in each adapter.

A slot's weights for one of a layer's two linears (gate_up, or down) are all experts' A and B, each in one tensor. A's
rows are G groups of R: group g is what the g-th part of the outputs reads of P. So gate and up may share an A (G = 1),
or have one each (G = 2).

For the Triton kernels they are a record: int64 (byte offset of A, of B, of the scales, R, G, 0, 0, 0), offsets from the
record's own address, which ExtraTables holds by slot. R is a multiple of RANK_STEP, so that rows of B begin on 16
bytes; zeros make up for what an adapter's rank lacks.
"""

# E experts · D in · O out · R rank · G groups · C = G * R rows of A · T tokens · S slots

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables

RECORD_FIELDS = 8
RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One adapter's on one linear: y += B (scale * (A x)). a_ECD, b_EOR: of one dtype; scale_EG: float32."""

    a_ECD: Tensor
    b_EOR: Tensor
    scale_EG: Tensor

    @property
    def rank(self) -> int:
        return self.b_EOR.shape[2]

    @property
    def groups(self) -> int:
        return self.scale_EG.shape[1]

    def __post_init__(self) -> None:
        experts, columns, _ = self.a_ECD.shape
        assert self.rank % RANK_STEP == 0
        assert columns == self.rank * self.groups and self.b_EOR.shape[1] % self.groups == 0
        assert self.scale_EG.shape[0] == self.b_EOR.shape[0] == experts


@dataclass(frozen=True, slots=True)
class StepExperts:
    """The adapters of a step on one linear. slot_T: int32, each token's slot, or -1. slots: for the torch twin.
    record_S: int64, addresses, 0 where a slot has nothing there. max_rank: of any slot. dtype: of A and B. side_stream:
    to compute beside the base's linear on; None on a CPU."""

    slot_T: Tensor
    slots: Sequence[ExpertWeights | None]
    record_S: Tensor
    max_rank: int
    dtype: torch.dtype
    side_stream: torch.cuda.Stream | None = None

    @property
    def columns(self) -> int:
        """Of P, at most."""
        return 2 * self.max_rank


class ExpertLoRA:
    """The slots of one of a mixture's linears. linear: 0 for gate_up, 1 for down. max_rank: that a slot may have."""

    def __init__(self, mixture: int, linear: int, tables: LoRATables, max_rank: int, dtype: torch.dtype) -> None:
        self.slots: list[ExpertWeights | None] = [None] * tables.rank_LSP.shape[1]
        self._record_S = tables.extras.address_VS[tables.extras.expert_row(mixture, linear)]
        self._max_rank = max_rank
        self._dtype = dtype

    def in_step(self, batch: LoRABatch) -> StepExperts:
        max_rank = padded_rank(self._max_rank if batch.max_rank is None else batch.max_rank)
        return StepExperts(batch.plan.slot_T, self.slots, self._record_S, max_rank, self._dtype, batch.side_stream)


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP

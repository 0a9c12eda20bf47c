"""Adapters on the experts of a mixture: each expert has its own A and B in each adapter.

A slot's weights for one of a layer's two linears (gate_up or down) are all experts' A in one tensor and all experts' B
in another. A's rows are G groups of R: the g-th part of the outputs reads group g of P. So gate and up may share an A
(G = 1), or have one each (G = 2). down has one group, as has up where there is no gate.

For the Triton kernels, the weights are a record of int64 numbers: the byte offsets of A, B and the scales, R, G and
three zeros. Offsets count from the record's own address, which ExtraTables holds by slot. R is a multiple of
RANK_STEP, so that rows of B begin on 16 bytes; zeros fill the ranks that an adapter does not have.
"""

# E experts · D in · O out · R rank · G groups · C = G * R rows of A · T tokens · S slots

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables

RECORD_FIELDS = 8
RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One adapter's weights on one linear of all experts: y += B (scale * (A x))."""

    a_ECD: Tensor
    b_EOR: Tensor  # of the same dtype as a_ECD
    scale_EG: Tensor  # float32

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
    """The adapters of a step on one linear."""

    slot_T: Tensor  # int32: each token's slot, or -1
    order_T: Tensor  # int32: the tokens in the order of their slots, so that those of a slot follow each other
    slots: Sequence[ExpertWeights | None]  # for the torch twin
    record_S: Tensor  # int64: the records' addresses, 0 if a slot has nothing on this linear
    max_rank: int  # largest rank of any slot
    dtype: torch.dtype  # dtype of A and B
    side_stream: torch.cuda.Stream | None = None  # stream beside the base's linear; None on a CPU

    @property
    def columns(self) -> int:
        """The largest number of columns that P can have."""
        return 2 * self.max_rank


class ExpertOutput(NamedTuple):
    """The output of a linear for all pairs.

    If p_KNC is not None, the kernel that reads y adds B of these adapters times the sum of P over K.
    """

    y_NO: Tensor
    p_KNC: Tensor | None = None  # float32, see kernels/moe/expert_lora_triton.py
    adapters: StepExperts | None = None


class ExpertLoRA:
    """The slots of one of a mixture's linears: gate_up (linear 0) or down (linear 1).

    max_rank is the largest rank that a slot may have.
    """

    def __init__(self, mixture: int, linear: int, tables: LoRATables, max_rank: int, dtype: torch.dtype) -> None:
        self.slots: list[ExpertWeights | None] = [None] * tables.rank_LSP.shape[1]
        self._record_S = tables.extras.address_VS[tables.extras.expert_row(mixture, linear)]
        self._max_rank = max_rank
        self._dtype = dtype

    def in_step(self, batch: LoRABatch) -> StepExperts:
        max_rank = padded_rank(self._max_rank if batch.max_rank is None else batch.max_rank)
        return StepExperts(
            batch.plan.slot_T,
            batch.plan.order_T,
            self.slots,
            self._record_S,
            max_rank,
            self._dtype,
            batch.side_stream,
        )


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP

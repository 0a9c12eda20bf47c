"""The embedding of tokens whose adapter has a table, rows or low-rank matrices of its own for it.

A slot holds a part of its tokens' embeddings, just as each tensor-parallel rank holds a part of the base's: in the sum
over the ranks, a token comes from the one rank that has it. For other tokens, a slot with a table gives zeros. A slot
without a table leaves the base's value unchanged, which is zero on this rank too.

For the Triton kernel, a slot's embedding is a record of int64 numbers: the first token, the number of tokens, the byte
offset of the table, the number of replaced rows, the offsets of their tokens and of the rows, the rank, the offsets of
A and of B, and the bits of the float32 scale. Offsets count from the record's own address; 0 means that there is none.
"""

# T tokens · D hidden size · W tokens of the slot's part · N replaced rows · R rank

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables

RECORD_FIELDS = 10


@dataclass(frozen=True, slots=True)
class SlotEmbedding:
    """One slot's part of the embedding. Its floats have one dtype, which need not be the model's."""

    first_token: int  # first token of the slot's part
    num_tokens: int
    table_WD: Tensor | None = None  # may have more rows than num_tokens
    place_N: Tensor | None = None  # int64, ascending: the replaced rows' tokens minus first_token
    row_ND: Tensor | None = None  # the replaced rows
    a_WR: Tensor | None = None
    b_DR: Tensor | None = None
    scale: float = 1.0

    def apply(self, token_T: Tensor, base_TD: Tensor) -> Tensor:
        """Returns the tokens' embeddings, float32 [T, D], made from the base's. This is the torch twin."""
        place_T = token_T - self.first_token
        own_T1 = ((place_T >= 0) & (place_T < self.num_tokens)).unsqueeze(1)
        place_T = place_T.clamp(0, max(self.num_tokens - 1, 0))
        out_TD = base_TD.float()
        if self.num_tokens == 0:
            return out_TD if self.table_WD is None else torch.zeros_like(out_TD)
        if self.table_WD is not None:
            out_TD = F.embedding(place_T, self.table_WD).float().masked_fill_(~own_T1, 0)
        if self.place_N is not None and self.row_ND is not None:
            at_T = torch.searchsorted(self.place_N, place_T).clamp_(max=len(self.place_N) - 1)
            found_T1 = own_T1 & (self.place_N[at_T] == place_T).unsqueeze(1)
            out_TD = torch.where(found_T1, self.row_ND[at_T].float(), out_TD)
        if self.a_WR is not None and self.b_DR is not None:
            added_TD = F.embedding(place_T, self.a_WR).float() @ self.b_DR.float().T
            out_TD = out_TD + added_TD.mul_(self.scale).masked_fill_(~own_T1, 0)
        return out_TD


class EmbeddingSlots:
    """The slots' own embeddings. For the Triton kernel, `dtype` is that of all their tensors."""

    def __init__(self, tables: LoRATables, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._slots: list[SlotEmbedding | None] = [None] * tables.extras.address_VS.shape[1]

    def set_slot(self, slot: int, embedding: SlotEmbedding | None) -> None:
        """Sets a slot's embedding for the torch twin."""
        self._slots[slot] = embedding

    def apply(self, token_T: Tensor, embedded_TD: Tensor, batch: LoRABatch) -> Tensor:
        """Replaces base embeddings by the slots' own in place, and returns embedded_TD. token_T is int64."""
        assert token_T.dtype == torch.int64 and embedded_TD.is_contiguous()
        if embedded_TD.is_cuda:
            from lorafleet.kernels.extras.slot_embedding_triton import (
                slot_embedding_triton,  # triton is optional on a CPU
            )

            slot_embedding_triton(token_T, embedded_TD, batch.addresses.embedding(), self._dtype)
            return embedded_TD
        for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
            own = self._slots[slot]
            if own is not None:
                rows = batch.order_T[start:end]
                embedded_TD[rows] = own.apply(token_T[rows], embedded_TD[rows]).to(embedded_TD.dtype)
        return embedded_TD

"""Computes the logits of rows whose adapter has a head of its own: a table in place of the base's, replaced rows, a
low rank, a bias.

It runs after the model, whose graphs compute the base's logits of all rows. Such heads are rare, and steps without one
pay nothing. Rows on the base's table are computed together, and so are the rows of each other table. Logits have the
width of their own vocabulary, divided among the ranks as its table is.
"""

# B rows · b rows of a slot · D hidden size · W a rank's columns · V vocabulary · N replaced rows · R rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.models.vocab_table import NEVER, VocabTable

WIDTH_ALIGNMENT = 64  # of logits of several vocabularies, since sampler.greedy takes them in parts


@dataclass(frozen=True, slots=True)
class SlotHead:
    """This rank's part of one slot's head. Floats have one dtype, which need not be the model's."""

    vocab_size: int
    num_tokens: int  # columns of tokens; the rest is padding
    table_WD: Tensor | None = None
    place_N: Tensor | None = None  # columns of the replaced rows
    row_ND: Tensor | None = None
    a_RD: Tensor | None = None
    b_WR: Tensor | None = None
    scale: float = 1.0
    bias_W: Tensor | None = None  # float32, replaces the base's; None: the base's, if it has one

    def change(self, x_bD: Tensor, logits_bW: Tensor, base_bias_W: Tensor | None) -> None:
        """Turns the product with its table, or with the base's if it has none, into its own logits, in place."""
        if self.place_N is not None and self.row_ND is not None:
            logits_bW[:, self.place_N] = F.linear(x_bD.to(self.row_ND.dtype), self.row_ND).to(logits_bW.dtype)
        if self.a_RD is not None and self.b_WR is not None:
            p_bR = F.linear(x_bD.to(self.a_RD.dtype), self.a_RD)
            if p_bR.dtype == logits_bW.dtype:
                logits_bW.addmm_(p_bR, self.b_WR.T, alpha=self.scale)
            else:
                logits_bW.add_(F.linear(p_bR, self.b_WR), alpha=self.scale)
        bias_W = base_bias_W if self.bias_W is None else self.bias_W
        if bias_W is not None:
            logits_bW += bias_W


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """The logits of rows that share a table."""

    row_b: Tensor  # int64, on the device
    logits_bW: Tensor
    vocab_size: int


class SlotHeads:
    """The heads of all slots that have one of their own, the same slots on all ranks. `base` is the model's head."""

    def __init__(self, base: VocabTable) -> None:
        self._base = base
        self._slots: dict[int, SlotHead] = {}

    def set_slot(self, slot: int, head: SlotHead | None) -> None:
        self._slots.pop(slot, None)
        if head is not None:
            self._slots[slot] = head

    def are_used(self, slots: Sequence[int]) -> bool:
        return bool(self._slots) and not self._slots.keys().isdisjoint(slots)

    def logits(self, x_BD: Tensor, base_BW: Tensor, slots: Sequence[int]) -> list[OwnLogits]:
        """Returns the logits of the rows with a head of their own.

        `base_BW` is VocabTable.logits of x. `slots` has each row's slot, or BASE_SLOT.
        """
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot != BASE_SLOT and slot in self._slots:
                rows.setdefault(slot, []).append(row)
        heads = [(self._slots[slot], rows[slot]) for slot in sorted(rows)]
        on_base = [(head, own) for head, own in heads if head.table_WD is None]
        owned = [self._with_table(head, own, x_BD) for head, own in heads if head.table_WD is not None]
        return [*owned, self._on_base(on_base, x_BD, base_BW)] if on_base else owned

    def _on_base(self, heads: list[tuple[SlotHead, list[int]]], x_BD: Tensor, base_BW: Tensor) -> OwnLogits:
        """Computes the logits of all heads on the base's table together. Each costs as many launches as its changes."""
        row_b = to_device([row for _, own in heads for row in own], torch.int64, x_BD.device)
        x_bD = x_BD[row_b]
        # If the model scales, caps or shifts logits, the base's are changed already, so they are computed again.
        logits_bW = self._base.project(x_bD) if self._base.changes_products else base_BW[row_b]
        counts = [len(own) for _, own in heads]
        for (head, _), own_bD, own_bW in zip(heads, x_bD.split(counts), logits_bW.split(counts), strict=True):
            head.change(own_bD, own_bW, self._base.bias)
        return OwnLogits(row_b, self._base.finish(logits_bW, self._base.num_tokens), self._base.vocab_size)

    def _with_table(self, head: SlotHead, rows: list[int], x_BD: Tensor) -> OwnLogits:
        assert head.table_WD is not None
        row_b = to_device(rows, torch.int64, x_BD.device)
        x_bD = x_BD[row_b]
        logits_bW = F.linear(x_bD.to(head.table_WD.dtype), head.table_WD).to(x_bD.dtype)
        head.change(x_bD, logits_bW, self._base.bias)
        return OwnLogits(row_b, self._base.finish(logits_bW, head.num_tokens), head.vocab_size)

    def choose(self, owned: list[OwnLogits], token_B: Tensor) -> None:
        """Writes the greedy tokens of these rows to token_B, on all ranks."""
        for own in owned:
            token_B[own.row_b] = greedy_of_ranks(own.logits_bW, self._base.group)

    def gather(self, owned: list[OwnLogits], base_BV: Tensor) -> Tensor:
        """Returns [B, V'] on every rank: base_BV, as VocabTable.gather returns it, with these rows' own logits.

        A row of a smaller vocabulary than the largest here is -inf beyond its own.
        """
        if not owned:
            return base_BV
        width = max(base_BV.shape[1], *(own.vocab_size for own in owned))
        width = -(-width // WIDTH_ALIGNMENT) * WIDTH_ALIGNMENT
        whole_BV = base_BV.new_full((len(base_BV), width), NEVER)
        whole_BV[:, : base_BV.shape[1]] = base_BV
        for own in owned:
            gathered_NbW = self._base.group.all_gather(own.logits_bW)
            own_bV = gathered_NbW.transpose(0, 1).flatten(1)[:, : own.vocab_size]
            whole_BV[own.row_b] = F.pad(own_bV, (0, width - own.vocab_size), value=NEVER)
        return whole_BV

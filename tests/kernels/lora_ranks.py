"""The ranks of a tensor-parallel group one after the other in one process, and their parts of a packed linear."""

# N ranks · T tokens · D in · O out

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.lora.packed_lora import AdapterTable, LoRATables, PackedLoRA, SlotWeights, with_scales_behind

Kind = Literal["column", "row"]


@dataclass
class FakeRank:
    """Its first run hears nothing from the others, its second one what all have sent in their first."""

    rank: int
    size: int
    sent: dict[int, Tensor] = field(default_factory=dict)  # shared by the ranks

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(sum(self._all(x)))

    def _all(self, x: Tensor) -> list[Tensor]:
        if len(self.sent) == self.size:
            assert torch.equal(self.sent[self.rank].nan_to_num(), x.nan_to_num())
            return [self.sent[rank] for rank in range(self.size)]
        assert self.rank not in self.sent, "one collective a linear"
        self.sent[self.rank] = x.clone()
        assert all(x.shape == other.shape for other in self.sent.values())
        return [x.clone()] * self.size


def on_fake_ranks(size: int, work: Callable[[FakeRank], Tensor]) -> list[Tensor]:
    ranks = [FakeRank(rank, size) for rank in range(size)]
    for rank in ranks:
        rank.sent = ranks[0].sent
    for rank in ranks:
        work(rank)
    return [work(rank) for rank in ranks]


def part_of_packed(whole: PackedLoRA, rank: FakeRank, kind: Kind, fully_sharded: bool) -> PackedLoRA:
    """What one rank holds. Outputs of a column-parallel linear must divide; nothing else need."""
    outs, size = whole.out_features, rank.size
    layout, columns = LoRALayout(), slice(0, whole.in_features)
    if kind == "column":
        rows_of_b = [slice(rank.rank * out // size, (rank.rank + 1) * out // size) for out in outs]
        if fully_sharded:
            layout = LoRALayout("gather", rank)
    else:
        columns = part(whole.in_features, rank)
        rows_of_b = [slice(0, out) for out in outs]
        if fully_sharded:
            rows_of_b = [part(outs[0], rank)]
            layout = LoRALayout("reduce", rank, rows_of_b[0].start)
    tables = LoRATables(2, len(whole.slots), torch.device("cpu"))
    own = PackedLoRA(1, columns.stop - columns.start, tuple(s.stop - s.start for s in rows_of_b), tables, layout)
    for slot, weights in enumerate(whole.slots):
        mine = None
        if weights is not None:
            own_rows = [slice(0, r) if kind == "row" or not fully_sharded else part(r, rank) for r in weights.ranks]
            a_RD = _rows(weights.a_RD, weights.ranks, own_rows)[:, columns].contiguous()
            b = [None if m is None else m[rows].contiguous() for m, rows in zip(weights.b, rows_of_b, strict=True)]
            row_scale_R = None
            if weights.row_scale_R is not None:
                row_scale_R = _rows(weights.row_scale_R, weights.ranks, own_rows)
                a_RD, row_scale_R = with_scales_behind(a_RD, row_scale_R)
            mine = SlotWeights(a_RD, tuple(b), weights.scales, row_scale_R)
        own.set_slot(slot, mine)
        tables.write_slot(slot, AdapterTable.of([None, mine]))
    return own


def _rows(stacked: Tensor, sizes: tuple[int, ...], rows: list[slice]) -> Tensor:
    """Of each slice's rows, those."""
    return torch.cat([m[own] for m, own in zip(stacked.split(sizes), rows, strict=True)])


def part(size: int, rank: FakeRank) -> slice:
    """Equal parts, rounded up: the last ranks may have less, or nothing."""
    each = -(-size // rank.size)
    return slice(min(rank.rank * each, size), min((rank.rank + 1) * each, size))


def own_input(x_TD: Tensor, rank: FakeRank, kind: Kind) -> Tensor:
    return x_TD if kind == "column" else x_TD[:, part(x_TD.shape[1], rank)].contiguous()


def own_base(y_TO: Tensor, rank: FakeRank, kind: Kind, out_features: tuple[int, ...]) -> Tensor:
    """The base's output, as far as this rank has it: for a row-parallel linear, a share whose sum over ranks is y."""
    if kind == "row":
        return y_TO / rank.size
    size = rank.size
    slices = y_TO.split(out_features, dim=1)
    return torch.cat([s[:, rank.rank * s.shape[1] // size :][:, : s.shape[1] // size] for s in slices], dim=1)


def joined(ys: list[Tensor], kind: Kind, out_features: tuple[int, ...]) -> Tensor:
    """What all ranks have together: after the base's own all-reduce, or side by side."""
    if kind == "row":
        return torch.stack(ys).double().sum(0)
    slices = [y.split([out // len(ys) for out in out_features], dim=1) for y in ys]
    return torch.cat([own[p] for p in range(len(out_features)) for own in slices], dim=1).double()

"""The tables that the Triton kernels read, on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import AdapterTable, LoRATables, PackedLoRA, SlotWeights


def weights(*ranks: int) -> SlotWeights:
    b: tuple[Tensor | None, ...] = tuple(torch.zeros(8, r) if r else None for r in ranks)
    return SlotWeights(torch.zeros(sum(ranks), 16), b, tuple(0.5 + i for i in range(len(ranks))))


def test_a_written_slot_says_where_its_matrices_lie_and_how_large_they_are() -> None:
    tables = LoRATables(2, 3, torch.device("cpu"))
    adapter = weights(4, 0, 2)
    tables.write_slot(1, AdapterTable.of([None, adapter]))
    b = [0 if b is None else b.data_ptr() for b in adapter.b]
    assert tables.address_LSA[:, 1].tolist() == [[0, 0, 0, 0], [adapter.a_RD.data_ptr(), *b]]
    assert tables.rank_LSP[:, 1].tolist() == [[0, 0, 0], [4, 0, 2]]
    assert tables.scale_LSP[1, 1].tolist() == [0.5, 0, 2.5]
    assert not tables.address_LSA[:, [0, 2]].any()


def test_matrices_of_a_block_lie_where_the_slot_has_put_them() -> None:
    tables = LoRATables(1, 1, torch.device("cpu"))
    table = AdapterTable.empty(1)
    table.offset_LA[0, :2] = 0, 256
    table.rank_LP[0, 0] = 8
    tables.write_slot(0, table, np.array([[1 << 40, 4096, 0, 0]]))
    assert tables.address_LSA[0, 0].tolist() == [1 << 40, 4096, 0, 0]


def test_the_largest_rank_follows_what_is_written() -> None:
    tables = LoRATables(1, 2, torch.device("cpu"))
    packed = PackedLoRA(0, 16, (8,), tables)
    assert packed.max_total_rank((0, 1)) == 0
    tables.write_slot(0, AdapterTable.of([weights(4)]))
    tables.write_slot(1, AdapterTable.of([weights(6)]))
    assert (packed.max_total_rank((0,)), packed.max_total_rank((0, 1))) == (4, 6)
    tables.write_slot(1, AdapterTable.of([weights(2)]))
    assert packed.max_total_rank((0, 1)) == 4

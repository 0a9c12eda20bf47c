"""The addresses of a step's tiles and tokens, looked up on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables
from tests.kernels.lora_cases import make_packed

LINEAR, NORM = 1, 0


def test_tiles_have_the_tables_of_their_slots_in_memory_that_never_moves() -> None:
    packed = make_packed(32, (16,), ((4,), (8,), (2,)))
    batch = LoRABatch.static(6, 4, 8, packed.tables)
    places = set()
    for slots in ([1, 1, 0], [2, BASE_SLOT, 1, 2], []):
        batch.fill(slots, [4, 8, 2])
        batch.addresses.look_up()
        tables = batch.addresses.tables
        places.add((id(tables), tables.address_LKA.data_ptr(), tables.rank_LKP.data_ptr(), tables.scale_LKP.data_ptr()))
        ranks = packed.tables.rank_LSP[LINEAR, :, 0].tolist()
        found = tables.rank_LKP[LINEAR, :, 0].tolist()
        assert found == [0 if slot == BASE_SLOT else ranks[slot] for slot in batch.plan.slot_K.tolist()]
        assert {rank for rank in found if rank} == {ranks[slot] for slot in slots if slot != BASE_SLOT}
    assert len(places) == 1


def test_tokens_have_the_addresses_of_their_slots_own_norms_biases_and_embeddings() -> None:
    tables = LoRATables(2, 2, torch.device("cpu"), num_norms=1)
    extras = tables.extras
    numbers = np.arange(1, extras.num_rows + 1, dtype=np.int64)
    for slot in range(2):
        extras.write_slot(slot, numbers * 10 ** (1 + slot))
    batch = LoRABatch.build([0, BASE_SLOT, 1], tables)
    assert batch is not None
    batch.addresses.look_up()
    by_token = torch.tensor([10, 0, 100])
    affine = extras.affine_row(LINEAR)
    expected = torch.stack([(1 + affine) * by_token, (2 + affine) * by_token])
    torch.testing.assert_close(batch.addresses.affine(LINEAR), expected)
    torch.testing.assert_close(batch.addresses.norm(NORM), (1 + extras.norm_row(NORM)) * by_token)
    torch.testing.assert_close(batch.addresses.embedding(), (1 + extras.embedding_row) * by_token)

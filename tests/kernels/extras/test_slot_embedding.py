from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.extras.slot_embedding import EmbeddingSlots, SlotEmbedding
from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.vocab_extras import record_address, slot_embedding, vocab_tensors
from lorafleet.workers.slots.vocab_weights import VocabWeights
from tests.kernels.harness import run_interpreted

VOCAB, SIZE = 50, 40  # of the base; the size is no power of two
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def allocate(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def make_parts(dtype: torch.dtype, size: int = SIZE, vocab: int = VOCAB) -> list[VocabWeights]:
    """Of one rank: the whole vocabulary, and parts in its middle; every mixture of table, rows and low rank."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    places = torch.tensor([0, 1, 5, 11, 12, 19])
    low = {"a": normal(vocab, 5), "b": normal(size, 5), "scaling": 0.5}
    wide = {"a": normal(vocab, 33), "b": normal(size, 33), "scaling": -1.5}
    rows = {"place_N": places, "row_ND": normal(len(places), size)}
    return [
        VocabWeights(vocab, 0, vocab, vocab, **low),
        VocabWeights(vocab, 0, vocab, vocab, table_WD=normal(vocab, size)),
        VocabWeights(vocab, 0, vocab, vocab, **rows),
        VocabWeights(vocab + 14, 0, vocab + 14, vocab + 14, table_WD=normal(vocab + 14, size), **rows),
        VocabWeights(vocab, 10, 20, 25, table_WD=normal(25, size), **rows, **wide),
        VocabWeights(vocab, 10, 20, 25, **rows),
        VocabWeights(vocab, vocab, 0, 25, table_WD=normal(25, size)),  # a rank without tokens
    ]


def reference(token: int, base_D: Tensor, own: VocabWeights | None) -> Tensor:
    """One token's, in float64."""
    if own is None:
        return base_D.double()
    place = token - own.first_token
    if not 0 <= place < own.num_tokens:
        return base_D.double() if own.table_WD is None else torch.zeros_like(base_D).double()
    out_D = base_D.double() if own.table_WD is None else own.table_WD[place].double()
    if own.place_N is not None and own.row_ND is not None and place in own.place_N.tolist():
        out_D = own.row_ND[own.place_N.tolist().index(place)].double()
    if own.a is not None and own.b is not None:
        out_D = out_D + own.scaling * (own.b.double() @ own.a[place].double())
    return out_D


def check(dtype: torch.dtype, device: str, num_tokens: int = 97, size: int = SIZE, vocab: int = VOCAB) -> None:
    """A mix of all slots, an empty one and base tokens; on "cpu" by the twin, unless Triton's interpreter runs."""
    parts = make_parts(dtype, size, vocab)
    tables = LoRATables(1, len(parts) + 1, torch.device(device))
    slots = EmbeddingSlots(tables, dtype)
    blocks = []
    for slot, own in enumerate(parts):
        extra = ExtraBlock.of(vocab_tensors(own, None), allocate)
        on_device = extra.in_memory(extra.block.to(device))
        blocks.append(on_device)
        slots.set_slot(slot, slot_embedding(extra))
        address_V = torch.zeros(tables.extras.num_rows, dtype=torch.int64).numpy()
        address_V[tables.extras.embedding_row] = record_address(on_device)
        tables.extras.write_slot(slot, address_V)
    generator = torch.Generator().manual_seed(1)
    slot_of_token = torch.randint(BASE_SLOT, len(parts) + 1, (num_tokens,), generator=generator).tolist()
    token_T = torch.randint(vocab, (num_tokens,), generator=generator)
    base_TD = torch.randn(num_tokens, size, generator=generator).to(dtype)
    batch = LoRABatch.build(slot_of_token, tables)
    assert batch is not None
    if device == "cuda":
        batch.begin()
    out_TD = slots.apply(token_T.to(device), base_TD.clone().to(device), batch).cpu()
    owners = [None if slot == BASE_SLOT or slot >= len(parts) else parts[slot] for slot in slot_of_token]
    want_TD = torch.stack(
        [reference(t, base_D, own) for t, base_D, own in zip(token_T.tolist(), base_TD, owners, strict=True)]
    )
    torch.testing.assert_close(out_TD.double(), want_TD, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_twin_gives_every_token_its_slots_own(dtype):
    check(dtype, "cpu")


def test_the_kernel_gives_every_token_its_slots_own_under_the_interpreter():
    run_interpreted(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
        import torch
        from lorafleet.kernels.extras import slot_embedding
        from lorafleet.kernels.extras.slot_embedding_triton import slot_embedding_triton
        from tests.kernels.extras import test_slot_embedding as here
        from lorafleet.kernels.lora.lora_batch import LoRABatch

        def apply(self, token_T, x_TD, batch):
            batch.addresses.look_up()
            slot_embedding_triton(token_T, x_TD, batch.addresses.embedding(), self._dtype)
            return x_TD

        slot_embedding.EmbeddingSlots.apply = apply
        for dtype in (torch.float32, torch.float16):
            here.check(dtype, "cpu", num_tokens=41)
        """
    )


def test_two_empty_parts_leave_the_base_alone():
    base_TD = torch.randn(3, SIZE)
    assert torch.equal(SlotEmbedding(7, 0).apply(torch.tensor([0, 7, 8]), base_TD), base_TD)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 97, 2048])
    def test_the_kernel_gives_every_token_its_slots_own(self, dtype, num_tokens):
        check(dtype, "cuda", num_tokens)
        check(dtype, "cuda", num_tokens, size=4096, vocab=1000)

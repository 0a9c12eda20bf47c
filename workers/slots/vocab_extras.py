"""Converts the extras of embedding and head from a rank's VocabWeights to an ExtraBlock's tensors. From these it makes
the record that the embedding's kernel reads, the torch twin's embedding and the head's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.extras.slot_embedding import RECORD_FIELDS, SlotEmbedding
from lorafleet.workers.models.slot_heads import SlotHead
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.vocab_weights import VocabWeights

RECORD = "embedding record"
HEAD_RECORD = "head record"


def vocab_tensors(embedding: VocabWeights | None, head: VocabWeights | None) -> dict[str, Tensor]:
    """Returns the tensors by name. Each record comes first, since its offsets are relative to its own address."""
    tensors: dict[str, Tensor] = {}
    if embedding is not None:
        tensors |= _embedding_tensors(embedding)
    if head is not None:
        shares = embedding is not None and _same(embedding.table_WD, head.table_WD)
        tensors |= _head_tensors(head, shares)
    return tensors


def record_address(extra: ExtraBlock) -> int:
    return extra.address(RECORD)


def slot_embedding(extra: ExtraBlock) -> SlotEmbedding | None:
    """Returns the torch twin's embedding, or None if the adapter uses the base's."""
    record_F = extra.get(RECORD)
    if record_F is None:
        return None
    return SlotEmbedding(
        first_token=int(record_F[0]),
        num_tokens=int(record_F[1]),
        table_WD=extra.get(_name("embedding", "table")),
        place_N=extra.get(_name("embedding", "places")),
        row_ND=extra.get(_name("embedding", "rows")),
        a_WR=extra.get(_name("embedding", "a")),
        b_DR=extra.get(_name("embedding", "b")),
        scale=record_F[9:10].view(torch.float32)[0].item(),
    )


def slot_head(on_host: ExtraBlock, extra: ExtraBlock) -> SlotHead | None:
    """Returns the head with the tensors of `extra`, or None if the adapter uses the base's head.

    Its numbers are read from `on_host`, the same extras in host memory.
    """
    numbers = on_host.get(HEAD_RECORD)
    if numbers is None:
        return None
    shares = bool(numbers[2])
    return SlotHead(
        vocab_size=int(numbers[0]),
        num_tokens=int(numbers[1]),
        table_WD=extra.get(_name("embedding" if shares else "head", "table")),
        place_N=extra.get(_name("head", "places")),
        row_ND=extra.get(_name("head", "rows")),
        a_RD=extra.get(_name("head", "a")),
        b_WR=extra.get(_name("head", "b")),
        scale=numbers[3:4].view(torch.float32)[0].item(),
        bias_W=extra.get(_name("head", "bias")),
    )


def _embedding_tensors(own: VocabWeights) -> dict[str, Tensor]:
    record_F = torch.zeros(RECORD_FIELDS, dtype=torch.int64)
    tensors = {RECORD: record_F} | _tensors("embedding", own)
    offsets = ExtraBlock.offsets(tensors)

    def offset(part: str) -> int:
        return offsets.get(_name("embedding", part), 0)

    num_replaced = 0 if own.place_N is None else len(own.place_N)
    rank = 0 if own.b is None else own.b.shape[1]
    record_F[:9] = torch.tensor(
        [
            own.first_token,
            own.num_tokens,
            offset("table"),
            num_replaced,
            offset("places"),
            offset("rows"),
            rank,
            offset("a"),
            offset("b"),
        ]
    )
    record_F[9:10].view(torch.float32)[0] = own.scaling
    return tensors


def _head_tensors(own: VocabWeights, shares_table: bool) -> dict[str, Tensor]:
    numbers = torch.tensor([own.vocab_size, own.num_tokens, int(shares_table), 0])
    numbers[3:4].view(torch.float32)[0] = own.scaling
    tensors = {HEAD_RECORD: numbers} | _tensors("head", own)
    if shares_table:
        del tensors[_name("head", "table")]
    return tensors


def _tensors(module: str, own: VocabWeights) -> dict[str, Tensor]:
    parts = {
        "table": own.table_WD,
        "places": own.place_N,
        "rows": own.row_ND,
        "a": own.a,
        "b": own.b,
        "bias": own.bias_W,
    }
    return {_name(module, part): tensor.contiguous() for part, tensor in parts.items() if tensor is not None}


def _same(table: Tensor | None, other: Tensor | None) -> bool:
    """Returns whether both are the same table. If the base ties them, a resized vocabulary is saved as one table, or
    twice."""
    if table is None or other is None or table.shape != other.shape:
        return False
    return table.data_ptr() == other.data_ptr() or torch.equal(table, other)


def _name(module: str, part: str) -> str:
    return f"{module} {part}"

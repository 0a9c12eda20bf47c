"""What rank 0 of a replica tells the others, in one order for all, and what they answer. msgpack.

Plain data; workers/tp/link.py carries it. Rank 0 decides everything: which steps run, which adapter lies in which slot.
"""

# T tokens of the step · F fields of a token

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from lorafleet.protocol.errors import WireError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, StepPlan


class RunStep(msgspec.Struct, tag=True):
    """A StepPlan. fields: int64 [F, T]. blocks: int32, all sequences' blocks, as many of each as its context fills.
    generations: of each slot that the step uses, so that no rank computes with another adapter than the rest."""

    fields: bytes
    query_lens: list[int]
    context_lens: list[int]
    blocks: bytes
    slots: list[int]
    base_lens: list[int]
    sampling: list[int]
    is_greedy: bool
    prompts: list[tuple[int, int]]
    slot_ranks: list[int]
    generations: list[tuple[int, int]]

    @classmethod
    def of(cls, plan: StepPlan, block_size: int, generations: list[tuple[int, int]]) -> RunStep:
        batch = plan.attention
        blocks = array("i")
        for table, length in zip(batch.block_tables, batch.context_lens, strict=True):
            blocks.extend(table[: _num_blocks(length, block_size)])
        return cls(
            plan.fields_FT.tobytes(),
            batch.query_lens,
            batch.context_lens,
            blocks.tobytes(),
            plan.slots,
            plan.base_lens,
            plan.sampling,
            plan.is_greedy,
            plan.prompts,
            plan.slot_ranks,
            generations,
        )

    def plan(self, block_size: int) -> StepPlan:
        blocks, tables, at = array("i"), [], 0
        blocks.frombytes(self.blocks)
        for length in self.context_lens:
            count = _num_blocks(length, block_size)
            tables.append(blocks[at : at + count])
            at += count
        return StepPlan(
            fields_FT=np.frombuffer(self.fields, np.int64).reshape(FIELDS, -1),
            attention=AttentionBatch(self.query_lens, self.context_lens, tables),
            slots=self.slots,
            base_lens=self.base_lens,
            sampling=self.sampling,
            is_greedy=self.is_greedy,
            prompts=self.prompts,
            slot_ranks=self.slot_ranks,
        )


class LoadShard(msgspec.Struct, tag=True):
    """Read and check the adapter, keep this rank's part of it; answered by a ShardLoaded."""

    load_id: int
    lora: LoRARequest


class FillSlot(msgspec.Struct, tag=True):
    """generation: the slot's, once it is filled."""

    digest: str
    slot: int
    generation: int


class EmptySlot(msgspec.Struct, tag=True):
    slot: int


class ForgetShard(msgspec.Struct, tag=True):
    """Drop the adapter from host memory; a slot that holds it keeps it."""

    digest: str


class Stop(msgspec.Struct, tag=True):
    pass


class ShardLoaded(msgspec.Struct, tag=True):
    """digest: of what was read. error: why it was not."""

    rank: int
    load_id: int
    digest: str = ""
    error: WireError | None = None


class RankFailed(msgspec.Struct, tag=True):
    """The rank ends, and with it the replica."""

    rank: int
    reason: str


Order = RunStep | LoadShard | FillSlot | EmptySlot | ForgetShard | Stop
Answer = ShardLoaded | RankFailed


def _num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)

"""Defines the messages from rank 0 of a replica to the other ranks, in one order for all, and their answers. They are
encoded as msgpack.

This is plain data, which workers/tp/link.py carries. Rank 0 decides everything: which steps run, which adapter lies in
which slot, and where the KV blocks lie that have left the GPU.
"""

# T tokens of the step · F fields of a token

from __future__ import annotations

from array import array
from typing import Literal

import msgspec
import numpy as np

from lorafleet.protocol.engine_control import MemoryTag, SleepLevel
from lorafleet.protocol.errors import WireError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, StepPlan
from lorafleet.workers.slots.lora_memory import Extent
from lorafleet.workers.tp.shared_unread import SentUnread

TierContent = Literal["blocks", "states"]  # KV blocks, and snapshots of recurrent states


class SentPlan(msgspec.Struct):
    """A StepPlan on its way to the other ranks."""

    fields: bytes  # int64 [F, T]
    query_lens: list[int]
    context_lens: list[int]
    blocks: bytes  # int32: all sequences' blocks, for each as many as its context fills
    slots: list[int]
    base_lens: list[int]
    sampling: list[int]
    is_greedy: bool
    prompts: list[tuple[int, int]]
    slot_ranks: list[int]
    state_slots: list[int]
    resumed_states: list[tuple[int, int]]
    state_snapshots: list[tuple[int, int]]
    kept_states: list[int]
    state_rings: list[list[int]]

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> SentPlan:
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
            plan.state_slots,
            plan.resumed_states,
            plan.state_snapshots,
            plan.kept_states,
            plan.state_rings,
        )

    def plan(self, block_size: int) -> StepPlan:
        blocks, tables, start = array("i"), [], 0
        blocks.frombytes(self.blocks)
        for length in self.context_lens:
            count = _num_blocks(length, block_size)
            tables.append(blocks[start : start + count])
            start += count
        return StepPlan(
            fields_FT=np.frombuffer(self.fields, np.int64).reshape(FIELDS, -1),
            attention=AttentionBatch(self.query_lens, self.context_lens, tables),
            slots=self.slots,
            base_lens=self.base_lens,
            sampling=self.sampling,
            is_greedy=self.is_greedy,
            prompts=self.prompts,
            slot_ranks=self.slot_ranks,
            state_slots=self.state_slots,
            resumed_states=self.resumed_states,
            state_snapshots=self.state_snapshots,
            kept_states=self.kept_states,
            state_rings=self.state_rings,
        )


class RunStep(msgspec.Struct, tag=True):
    """An order to run a step."""

    sent: SentPlan
    # (slot, generation) of each slot that the step uses, so that all ranks compute with the same adapters
    generations: list[tuple[int, int]]
    # Whether rank 0 sends the tokens that it draws right behind the step. Otherwise nothing is drawn, or it sends
    # ShareTokens first.
    shares_tokens: bool
    unread: SentUnread | None = None  # Set if share_unread() comes before the step.


class RunDraftStep(msgspec.Struct, tag=True):
    """An order to run a step of the head that drafts. All ranks have the tokens that it chooses."""

    sent: SentPlan
    sources: list[int]  # As in DraftSteps.run. Empty if share_unread() gives them.
    unread: SentUnread | None = None  # As in RunStep.


class ShareTokens(msgspec.Struct, tag=True):
    """An order to receive the tokens of the last RunStep, if these were not shared behind it."""

    num_rows: int


class LoadShard(msgspec.Struct, tag=True):
    """An order to read and check the adapter, and to hold this rank's part of it. ShardLoaded answers it."""

    load_id: int
    lora: LoRARequest


class FillSlot(msgspec.Struct, tag=True):
    """An order to fill a slot with an adapter."""

    digest: str
    slot: int
    generation: int  # the slot's, once it is filled
    extents: list[Extent]  # where each rank puts its A and B


class EmptySlot(msgspec.Struct, tag=True):
    slot: int


class ForgetShard(msgspec.Struct, tag=True):
    """An order to drop the adapter from host memory. A slot that holds it is not changed."""

    digest: str


class ReleaseMemory(msgspec.Struct, tag=True):
    """An order to give parts of the GPU's memory back, see RankMemory.release. MemoryMoved answers it."""

    tags: list[MemoryTag]
    level: SleepLevel


class TakeMemory(msgspec.Struct, tag=True):
    """An order to take parts of the GPU's memory again. MemoryMoved answers it."""

    tags: list[MemoryTag]


class CaptureGraphs(msgspec.Struct, tag=True):
    """An order to capture the CUDA graphs again, together with the other ranks. MemoryMoved answers it."""


class SaveBlocks(msgspec.Struct, tag=True):
    """An order to copy KV blocks, or snapshots of states, to slots of the host tier, before the next step."""

    content: TierContent
    pairs: list[tuple[int, int]]  # (block, slot)


class LoadBlocks(msgspec.Struct, tag=True):
    """An order to copy slots of the host tier to KV blocks, or to snapshots of states."""

    content: TierContent
    load_id: int
    pairs: list[tuple[int, int]]  # (slot, block)


class AwaitBlocks(msgspec.Struct, tag=True):
    """An order to run the next steps behind a LoadBlocks. The loads of a content are awaited in their order."""

    content: TierContent
    load_id: int


class WriteBlocks(msgspec.Struct, tag=True):
    """An order to write slots of the host tier to disk. BlocksMoved answers it."""

    content: TierContent
    job_id: int
    pairs: list[tuple[int, int]]  # (host slot, disk slot)


class ReadBlocks(msgspec.Struct, tag=True):
    """An order to read slots of the disk tier into the host tier. BlocksMoved answers it."""

    content: TierContent
    job_id: int
    pairs: list[tuple[int, int]]  # (disk slot, host slot)


class Stop(msgspec.Struct, tag=True):
    pass


class ShardLoaded(msgspec.Struct, tag=True):
    """The answer to a LoadShard."""

    rank: int
    load_id: int
    digest: str = ""  # of the adapter that was read
    error: WireError | None = None  # why it was not read


class MemoryMoved(msgspec.Struct, tag=True):
    """The answer to a ReleaseMemory, a TakeMemory or a CaptureGraphs."""

    rank: int
    digest: str  # RankMemory.digest behind it
    error: WireError | None = None  # why it was not carried out


class BlocksMoved(msgspec.Struct, tag=True):
    """The answer to a WriteBlocks or a ReadBlocks."""

    rank: int
    job_id: int
    failed: list[int] = []  # indices of the pairs that failed
    fault: str = ""  # why the last of them failed
    content: TierContent = "blocks"  # as in the order


class RankFailed(msgspec.Struct, tag=True):
    """A report that the rank ends, and with it the replica."""

    rank: int
    reason: str


BlockOrder = SaveBlocks | LoadBlocks | AwaitBlocks | WriteBlocks | ReadBlocks
MemoryOrder = ReleaseMemory | TakeMemory | CaptureGraphs
Order = (
    RunStep
    | RunDraftStep
    | ShareTokens
    | LoadShard
    | FillSlot
    | EmptySlot
    | ForgetShard
    | BlockOrder
    | MemoryOrder
    | Stop
)
Answer = ShardLoaded | BlocksMoved | MemoryMoved | RankFailed


def _num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)

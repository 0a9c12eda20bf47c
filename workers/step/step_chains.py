"""Runs several steps of the same sequences by one CUDA graph: each computes the token that the step before has chosen.

A draft model's steps are of this kind. The host knows where each of their tokens will lie before it knows the tokens.
So it plans all of the steps at once, and the GPU does not wait for the host between them.
"""

# K steps of a chain · B sequences of a graph · F fields of a token in a chain

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, MovableRows
from lorafleet.workers.device.step_inputs import InputTensors, StepInputs
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.step.decode_capture import ChainedSteps, DecodeGraph, DecodeKey
from lorafleet.workers.step.drafted_sizes import DraftShape

POSITION, KV_SLOT, ROW, NUM_ROWS, LENGTH = range(5)  # The fields. The last three are those of DecodeBatch.rows_B3.
FIELDS = 5
NO_SLOT = -1  # KV slot of a token that nobody needs.

Moves = np.ndarray[tuple[int, int], np.dtype[np.int64]]  # a number of each step and sequence


class Capturer(Protocol):
    """The part of DecodeCapture that is needed here."""

    def capture(self, key: DecodeKey, chain: ChainedSteps | None = None) -> DecodeGraph | None: ...

    def fill(self, decode: DecodeGraph, plan: StepPlan) -> None: ...


class TileCounts(Protocol):
    """The part of LoRAModelManager that is needed here."""

    def tile_counts(self, num_tokens: int) -> list[int]: ...


class FeaturesOfSteps(Protocol):
    """The part of FeatureRows that is needed here."""

    def begin(self, sources: list[int]) -> None: ...

    def end(self, sampling: list[int], sampled_B: Tensor) -> None: ...


class ChainMemory:
    """What the graphs of all chains read and write besides StepInputs. It never moves."""

    def __init__(self, most_steps: int, most_seqs: int, inputs: StepInputs, features: FeaturesOfSteps | None) -> None:
        device = inputs.sampled_B.device
        self.inputs = inputs
        self.features = features  # None if the model reads nothing but tokens.
        self.host_KFB = torch.zeros(most_steps, FIELDS, most_seqs, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.fields_KFB = torch.zeros(most_steps, FIELDS, most_seqs, dtype=torch.int64, device=device)
        self.token_KB = torch.zeros(most_steps, most_seqs, dtype=torch.int64, device=device)

    def upload(self, position_KB: Moves, kv_slot_KB: Moves, trash_slot: int) -> None:
        """Queues the copy of the steps' positions and KV slots. Columns without a sequence write to trash_slot, and so
        does what has NO_SLOT."""
        num_steps, num_seqs = position_KB.shape
        host_KFB = self.host_KFB.numpy()
        host_KFB[:, POSITION], host_KFB[:, KV_SLOT] = 0, trash_slot
        host_KFB[:num_steps, POSITION, :num_seqs] = position_KB
        host_KFB[:num_steps, KV_SLOT, :num_seqs] = np.where(kv_slot_KB == NO_SLOT, trash_slot, kv_slot_KB)
        host_KFB[:, ROW], host_KFB[:, NUM_ROWS] = np.arange(host_KFB.shape[2]), 1
        host_KFB[:, LENGTH] = host_KFB[:, POSITION] + 1
        self.fields_KFB.copy_(self.host_KFB, non_blocking=True)


class MemoryOfSteps:
    """The ChainedSteps of one number of steps."""

    def __init__(self, num_steps: int, memory: ChainMemory) -> None:
        self.num_steps = num_steps
        self._memory = memory

    def suits(self, attention: AttentionBackend) -> bool:
        return isinstance(attention, MovableRows)

    def begin(self, step: int, inputs: InputTensors, attention: AttentionBackend) -> None:
        size = len(inputs.position_T)
        field_FB = self._memory.fields_KFB[step, :, :size]
        inputs.position_T.copy_(field_FB[POSITION])
        inputs.rope_length_T.copy_(field_FB[LENGTH])
        inputs.kv_slot_T.copy_(field_FB[KV_SLOT])
        assert isinstance(attention, MovableRows)
        attention.take_rows(field_FB[ROW:].T)
        if step > 0:
            inputs.source_T.copy_(field_FB[ROW])
            if self._memory.features is not None:
                self._memory.features.begin(list(range(size)))

    def end(self, step: int, num_rows: int) -> None:
        memory = self._memory
        if memory.features is not None:
            memory.features.end(list(range(num_rows)), memory.inputs.sampled_B)
        memory.token_KB[step, :num_rows].copy_(memory.inputs.sampled_B[:num_rows])


class StepChains:
    """The graphs of one model's chains. There are none if the attention has no MovableRows.

    Args:
        sizes: Numbers of sequences of the graphs, in ascending order.
        counts: Numbers of steps of the graphs, in ascending order.
        most_rows: Largest number of rows of a sequence that the attention takes, at least the largest count.
        loras: Says how many LoRA tiles the graphs need. None if there are no adapters.
    """

    def __init__(
        self,
        capturer: Capturer,
        memory: ChainMemory,
        sizes: Sequence[int],
        counts: Sequence[int],
        most_rows: int,
        trash_slot: int,
        loras: TileCounts | None,
    ) -> None:
        self._capturer = capturer
        self._memory = memory
        self._sizes = sizes
        self._counts = counts
        self._most_rows = most_rows
        self._trash_slot = trash_slot
        self._loras = loras
        self._graphs: dict[tuple[int, int, bool], DecodeGraph] = {}  # By size, count, and whether there are adapters.
        self.capture()

    def capture(self) -> None:
        """Captures all graphs. Raises what capturing raises."""
        nothing = np.zeros((1, 0), np.int64)
        self._memory.upload(nothing, nothing, self._trash_slot)  # a capture begins with a run
        for size in reversed(self._sizes):
            tiles = [0] if self._loras is None else [0, self._loras.tile_counts(size)[-1]]
            for count in self._counts:
                for num_tiles in tiles:
                    key = DecodeKey(size, num_tiles, drafts=DraftShape(size, self._most_rows))
                    graph = self._capturer.capture(key, MemoryOfSteps(count, self._memory))
                    if graph is None:
                        return
                    self._graphs[size, count, num_tiles > 0] = graph

    def release(self) -> None:
        """Drops all graphs, until capture()."""
        self._graphs = {}

    def find(self, num_steps: int, slots: Sequence[int]) -> DecodeGraph | None:
        """Returns the smallest graph for so many steps of sequences with these LoRA slots, or None if there is none."""
        has_adapters = any(slot != BASE_SLOT for slot in slots)
        size = next((size for size in self._sizes if size >= len(slots)), None)
        count = next((count for count in self._counts if count >= num_steps), None)
        if num_steps < 2 or size is None or count is None:
            return None
        return self._graphs.get((size, count, has_adapters))

    def run(self, graph: DecodeGraph, plan: StepPlan, position_KB: Moves, kv_slot_KB: Moves) -> Tensor:
        """Launches the steps. Returns their tokens, int64 [K, B], which are valid until the next chain.

        Args:
            plan: As chain_plan() returns it.
            position_KB, kv_slot_KB: Where the token of each step lies. A sequence that needs fewer steps has its last
                position and NO_SLOT in the others.
        """
        self._memory.upload(position_KB, kv_slot_KB, self._trash_slot)
        self._capturer.fill(graph, plan)
        graph.graph.replay()
        num_steps, num_seqs = position_KB.shape
        return self._memory.token_KB[:num_steps, :num_seqs]


def chain_plan(plan: StepPlan, num_steps: Sequence[int]) -> StepPlan:
    """Returns the plan of a chain from that of its first step, which computes one token of each sequence.

    Args:
        num_steps: How many steps each sequence needs.
    """
    first = plan.attention
    ends = [end + count - 1 for end, count in zip(first.context_lens, num_steps, strict=True)]
    return replace(plan, attention=AttentionBatch(list(num_steps), ends, first.block_tables))


def chain_moves(plan: StepPlan, block_size: int) -> tuple[Moves, Moves]:
    """Returns the positions and the KV slots of a chain's tokens, both [K, B], as StepChains.run takes them."""
    batch = plan.attention
    step_K1 = np.arange(max(batch.query_lens))[:, None]
    count_B, end_B = np.array(batch.query_lens), np.array(batch.context_lens)
    position_KB = np.minimum(end_B - count_B + step_K1, end_B - 1)
    block_KB, offset_KB = np.divmod(position_KB, block_size)
    tables = zip(batch.block_tables, block_KB.T.tolist(), strict=True)
    first_KB = np.array([[table[block] for block in blocks] for table, blocks in tables]).T * block_size
    return position_KB, np.where(step_K1 < count_B, first_KB + offset_KB, NO_SLOT)

"""Holds the states of recurrent layers: one slot for each running sequence, one for the padding of captured steps, one
for each snapshot from which the prefix cache lets other sequences resume, and one for each draft token of a step.

A step with drafts writes the state behind each of a sequence's tokens to a slot of its own. The sequence goes on with
the one behind its last accepted draft, so nothing is copied or computed again when a draft is wrong. The device chooses
it if the step behind is planned before the host knows it (StepPlan.state_rings).

Rank 0's scheduler assigns the slots (workers/schedule/state_slots.py, state_snapshots.py). A slot is never cleared: a
sequence's first step takes its state to be zero, whatever the slot holds, unless it begins with a snapshot's copy.
"""

# S state slots · C channels · J earlier tokens · H value heads · K numbers of a key · V numbers of a value

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
from lorafleet.kernels.recurrent.slot_copies import SlotCopies
from lorafleet.workers.bases.recurrence_config import StateShape
from lorafleet.workers.device.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one recurrent layer."""

    conv_SCJ: Tensor  # In the model's dtype.
    memory_SHKV: Tensor  # float32


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states and the batch that a step's recurrent layers work on."""

    layers: list[LayerStates]  # One per recurrent layer.
    batch: RecurrentBatch


class StateCache:
    """The states of all recurrent layers on one rank, for at most max_num_seqs sequences at a time, and snapshots."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        num_snapshots: int = 0,
        num_drafts: int = 0,
    ) -> None:
        """`shapes` are this rank's, as in Shard.local. `num_drafts` is the largest number of draft tokens in a step."""
        self.padding_slot = max_num_seqs  # No sequence has it.
        self._device = device
        self.snapshot_slots = range(max_num_seqs + 1, max_num_seqs + 1 + num_snapshots)
        self.draft_slots = range(self.snapshot_slots.stop, self.snapshot_slots.stop + num_drafts)
        num_slots = self.draft_slots.stop
        self.layers = [
            LayerStates(
                torch.zeros(num_slots, *shape.conv, dtype=dtype, device=device),
                torch.zeros(num_slots, *shape.memory, dtype=torch.float32, device=device),
            )
            for shape in shapes
        ]
        self._copies = SlotCopies(self.tensors)
        if device.type == "cuda" and num_snapshots:
            self.copy([(self.padding_slot, self.padding_slot)])  # compiles the kernel before the first request

    @property
    def tensors(self) -> list[Tensor]:
        """The states of all layers, [S, ...]."""
        return [tensor for layer in self.layers for tensor in (layer.conv_SCJ, layer.memory_SHKV)]

    def find_addresses(self) -> None:
        """Must be called after the tensors have got other memory."""
        self._copies = SlotCopies(self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_bytes // self.draft_slots.stop

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.conv_SCJ.nbytes + layer.memory_SHKV.nbytes for layer in self.layers)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshot slots."""
        return self.slot_bytes * len(self.snapshot_slots)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the states of all layers for each pair (from, to) of slots. No slot is in two pairs as `to`, or as
        both."""
        if pairs:
            self._copies.run(pairs)

    def of_step(self, plan: StepPlan) -> StepStates:
        lens = plan.attention.query_lens
        batch = RecurrentBatch.build(lens, plan.state_slots, plan.begins, self._device, plan.kept_states)
        return StepStates(self.layers, batch)

    def of_padding(self, query_lens: Sequence[int], *, has_drafts: bool = False) -> StepStates:
        """Returns the states of a step that no sequence has, such as one that warms up or is captured."""
        slots, is_new = [self.padding_slot] * len(query_lens), [True] * len(query_lens)
        kept = [self.draft_slots[0]] * sum(query_lens) if has_drafts else []
        return StepStates(self.layers, RecurrentBatch.build(query_lens, slots, is_new, self._device, kept))

    def of_captured(self, num_rows: int, num_seqs: int, *, has_drafts: bool) -> StepStates:
        """Returns the states of a step that is captured, for refill(). No sequence has them yet. Without drafts, each
        row is a sequence of its own."""
        if not has_drafts:
            return self.of_padding([1] * num_rows)
        return StepStates(self.layers, RecurrentBatch.of_drafts(num_rows, num_seqs, self.padding_slot, self._device))

    def refill(self, states: StepStates, plan: StepPlan) -> None:
        """Gives a captured step the states of a plan's sequences, and its other rows the padding's."""
        lens = plan.attention.query_lens
        states.batch.refill(lens, plan.state_slots, plan.begins, self.padding_slot, plan.kept_states)

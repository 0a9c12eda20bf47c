"""Chains of steps on a CPU: each replay of a graph computes the steps one after another."""

from __future__ import annotations

from typing import Any

import torch

from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch
from lorafleet.workers.device.sampler import greedy
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.step.decode_capture import ChainedSteps, DecodeGraph, DecodeKey
from lorafleet.workers.step.step_chains import ChainMemory, StepChains
from lorafleet.workers.step.step_runner import StepRunner


class RowByRow:
    """Plans each step of a chain when its rows are known, with the blocks of the chain's plan."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention
        self._planned = AttentionBatch([], [], [])

    def plan(self, batch: AttentionBatch) -> None:
        self._planned = batch

    def take_rows(self, rows_B3: torch.Tensor) -> None:
        first_B, count_B, length_B = rows_B3.T.tolist()
        assert first_B == list(range(len(first_B))) and set(count_B) == {1}
        planned = self._planned.context_lens
        assert all(length <= most for length, most in zip(length_B, planned, strict=True))
        self._attention.plan(AttentionBatch(count_B, length_B, self._planned.block_tables))

    def for_graph(self, *_: object) -> None:
        return None

    def attend(self, layer: int, q_THD: torch.Tensor, out_THD: torch.Tensor | None = None) -> torch.Tensor:
        return self._attention.attend(layer, q_THD, out_THD)


class Replays:
    """Stands in for a CUDA graph."""

    def __init__(self, steps: StepRunner, num_rows: int, chain: ChainedSteps, attention: RowByRow) -> None:
        self._steps, self._num_rows, self._chain, self._attention = steps, num_rows, chain, attention
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        steps, inputs = self._steps, self._steps.inputs.tensors(self._num_rows)
        for step in range(self._chain.num_steps):
            self._chain.begin(step, inputs, self._attention)
            places = inputs.position_T, inputs.rope_length_T, inputs.kv_slot_T
            hidden_BD = steps.model(inputs.tokens(), *places, steps.caches, self._attention, None, None)
            steps.inputs.sampled_B[: self._num_rows].copy_(greedy(steps.model.logits(hidden_BD)))
            self._chain.end(step, self._num_rows)


class EagerCapturer:
    """Stands in for DecodeCapture."""

    def __init__(self, steps: StepRunner, trash: int) -> None:
        self._steps, self._trash = steps, trash
        self._attention = RowByRow(steps._attention)
        self.graphs: list[DecodeGraph] = []

    def capture(self, key: DecodeKey, chain: ChainedSteps | None = None) -> DecodeGraph | None:
        assert chain is not None and chain.suits(self._attention)
        replays: Any = Replays(self._steps, key.num_rows, chain, self._attention)
        nothing = torch.empty(0)
        self.graphs.append(DecodeGraph(key, replays, self._attention, None, None, nothing, nothing))
        return self.graphs[-1]

    def fill(self, decode: DecodeGraph, plan: StepPlan) -> None:
        batch, num_padded = plan.attention, decode.key.num_rows - len(plan.slots)
        self._steps.inputs.upload(plan.fields_FT, decode.key.num_rows)
        lens = batch.query_lens + [0] * num_padded, batch.context_lens + [1] * num_padded
        decode.attention.plan(AttentionBatch(*lens, [*batch.block_tables, *[[self._trash]] * num_padded]))


def add_chains(drafter: ModelDrafter, counts: tuple[int, ...] = (2, 3)) -> EagerCapturer:
    """Lets the drafter's steps be chains of so many. Returns what has their graphs."""
    steps, num_blocks = drafter.steps, drafter.kv.num_blocks
    capturer, memory = EagerCapturer(steps, num_blocks), ChainMemory(max(counts), 4, steps.inputs, drafter._rows)
    trash_slot = num_blocks * drafter.kv.block_size
    steps.chains = StepChains(capturer, memory, (1, 4), counts, max(counts) + 2, trash_slot, None)
    return capturer

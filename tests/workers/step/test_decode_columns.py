"""The plan of a step that follows the last plan is the one that would be made from nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.step.decode_columns import DecodeColumns, TokensBefore, no_decodes
from lorafleet.workers.step.planner import plan_step

BLOCK, FIRST_KNOWN = 4, 100


class Steps:
    """Plans the steps of a scheduler behind each other, and compares each plan with one that is made from nothing.

    Args:
        overlap: Whether a step is planned before the tokens of the one before are known.
    """

    def __init__(self, *, overlap: bool = True, num_blocks: int = 64) -> None:
        rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=128)
        kv = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=True)
        self.scheduler = Scheduler(kv, None, rope, 8, StepBudget(StepLimits(256)))
        self.last = no_decodes()
        self.num_known = 0  # Decodes of the newest plan that the plan before had too.
        self._overlap = overlap
        self._in_flight: list[Chunk] = []
        self._ends: list[int] = []

    def add(self, name: str, num_prompt: int, max_tokens: int = 50, temperature: float = 0, **other: int) -> Sequence:
        tokens, params = [len(name)] * num_prompt, SamplingParams(temperature=temperature, **other)  # type: ignore[arg-type]  # numbers only
        sequence = Sequence(name, tokens, num_prompt, params, seed=0, max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        chunks = self.scheduler.schedule(self._in_flight)
        sampling = [chunk for chunk in self._in_flight if chunk.sequence.tokens[-1] == UNKNOWN]
        before = TokensBefore({chunk.sequence.request_id: row for row, chunk in enumerate(sampling)})
        expected = plan_step(chunks, before, FIRST_KNOWN, BLOCK, [16])
        if self._in_flight:
            before = replace(before, chunks=self._in_flight)
        plan = plan_step(chunks, before, FIRST_KNOWN, BLOCK, [16], self.last)
        assert np.array_equal(plan.fields_FT, expected.fields_FT)
        for field in (
            "attention",
            "slots",
            "base_lens",
            "sampling",
            "is_greedy",
            "prompts",
            "num_decodes",
            "num_plain",
        ):
            assert getattr(plan, field) == getattr(expected, field), field
        places_C = self.last.find(chunks)
        self.num_known = len(chunks) if places_C is None else int((places_C >= 0).sum())
        self.last = DecodeColumns.of_plan(chunks, plan)
        self.scheduler.launched(chunks)
        ends = [chunk.sequence.num_computed for chunk in chunks]
        if self._overlap:
            self.collect()
        self._in_flight, self._ends = chunks, ends
        if not self._overlap:
            self.collect()
        return plan

    def collect(self) -> None:
        """Makes the tokens in flight known."""
        for chunk, end in zip(self._in_flight, self._ends, strict=True):
            sequence = chunk.sequence
            if not sequence.ended and end < len(sequence.tokens) and sequence.tokens[end] == UNKNOWN:
                sequence.tokens[end] = end
                if end + 1 - sequence.num_prompt >= sequence.max_tokens:
                    sequence.ended = True
                    self.scheduler.finish(sequence)
        self._in_flight, self._ends = [], []


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_of_the_same_decodes_follow_the_last_plan_over_the_ends_of_blocks(overlap: bool) -> None:
    steps = Steps(overlap=overlap)
    for name, num_prompt in (("one", 3), ("two", 9), ("three", 4)):
        steps.add(name, num_prompt)
    found = []
    for _ in range(12):
        steps.step()
        found.append(steps.num_known)
    assert found == [0, 0, *[3] * 10]  # the prompts, the first decodes, and the rest


@pytest.mark.parametrize("overlap", [True, False])
def test_decodes_follow_the_last_plan_while_others_come_and_end(overlap: bool) -> None:
    steps = Steps(overlap=overlap)
    rng = np.random.default_rng(0)
    num_known = []
    for i in range(60):
        if len(steps.scheduler.running) < 6:
            steps.add(f"{i}", int(rng.integers(2, 20)), max_tokens=int(rng.integers(2, 12)))
        steps.step()
        num_known.append(steps.num_known)
    assert np.mean(num_known) > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_plan_knows_which_decodes_are_plain_and_greedy_while_others_come_and_end(overlap: bool) -> None:
    steps = Steps(overlap=overlap)
    rng = np.random.default_rng(1)
    found = set()
    for i in range(80):
        if len(steps.scheduler.running) < 4:
            wanted = [{}, {}, {}, {"temperature": 1.0}, {"logprobs": 1}][i // 4 % 5]
            steps.add(f"{i}", int(rng.integers(2, 20)), max_tokens=int(rng.integers(1, 12)), **wanted)
        plan = steps.step()
        found.add((plan.is_greedy, plan.num_plain == plan.num_decodes))
    assert found == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("other", [{"temperature": 1.0}, {"logprobs": 1}])
def test_decodes_are_greedy_again_behind_the_only_token_of_one_that_was_not(other: dict[str, int]) -> None:
    steps = Steps()
    for name in ("one", "two"):
        steps.add(name, 3)
    steps.step()
    steps.add("three", 3, max_tokens=1, **other)
    assert [steps.step().is_greedy for _ in range(4)] == [False, True, True, True]


def test_a_token_that_the_host_knows_is_read_from_the_plan() -> None:
    steps = Steps()
    for name in ("first", "second"):
        steps.add(name, 5)
    for _ in range(3):
        steps.step()
    steps.collect()
    plan = steps.step()
    assert steps.num_known == 2
    assert plan.fields_FT[:2].tolist() == [[7, 7], [FIRST_KNOWN, FIRST_KNOWN + 1]]


def test_a_step_that_is_planned_again_without_a_sequence_that_has_ended_is_the_same_for_the_others() -> None:
    steps = Steps()
    ended, *_ = (steps.add(name, 5) for name in ("ended", "second", "third"))
    for _ in range(3):
        steps.step()
    chunks = steps.scheduler.schedule(steps._in_flight)
    before = TokensBefore({name: row for row, name in enumerate(("ended", "second", "third"))}, steps._in_flight)
    first = plan_step(chunks, before, FIRST_KNOWN, BLOCK, [], steps.last)
    kept = [chunk for chunk in chunks if chunk.sequence is not ended]
    again = plan_step(kept, before, FIRST_KNOWN, BLOCK, [], DecodeColumns.of_plan(chunks, first))
    assert np.array_equal(again.fields_FT, first.fields_FT[:, 1:])


def test_a_preempted_sequence_is_planned_from_nothing() -> None:
    steps = Steps()
    restarted, other = steps.add("restarted", 5), steps.add("other", 6)
    for _ in range(4):
        steps.step()
    steps.collect()
    before = restarted.next_chunk
    steps.scheduler.preempt(restarted)
    assert restarted.next_chunk is None
    steps.step()
    assert steps.num_known == 1
    plan = steps.step()
    assert steps.num_known == 1 and plan.num_decodes == 2
    assert restarted.next_chunk is not before and other.next_chunk is not None


def test_a_sequence_that_resumes_from_its_cached_blocks_is_planned_from_nothing() -> None:
    """All of its tokens but the last are in the cache. So its chunk equals that of the last plan."""
    steps = Steps(overlap=False)
    resumed = steps.add("resumed", 2 * BLOCK - 1)
    for _ in range(2):
        steps.step()
    steps.scheduler.commit(resumed, 2 * BLOCK)
    steps.scheduler.preempt(resumed)
    plan = steps.step()
    assert plan.num_decodes == 1
    assert steps.num_known == 0


def test_decodes_whose_adapter_has_yet_to_begin_are_planned_from_nothing() -> None:
    steps = Steps()
    late = steps.add("late", 5)
    steps.step()
    late.slot, late.first_adapted = 3, 7
    slots = []
    for _ in range(4):
        slots += steps.step().slots
    assert slots == [-1, -1, 3, 3]

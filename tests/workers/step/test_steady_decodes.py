"""The plan of a step that follows the last plan is the one that would be made from nothing."""

from __future__ import annotations

import numpy as np

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.step.planner import plan_step
from lorafleet.workers.step.steady_decodes import SteadyDecodes

BLOCK, FIRST_KNOWN = 4, 100


def make_scheduler() -> Scheduler:
    rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=128)
    return Scheduler(KVCacheManager(64, BLOCK, enable_prefix_caching=True), None, rope, 8, StepBudget(StepLimits(256)))


def add(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int = 50) -> Sequence:
    tokens = [len(name)] * num_prompt
    sequence = Sequence(name, tokens, num_prompt, SamplingParams(temperature=0), seed=0, max_tokens=max_tokens)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler, steady: SteadyDecodes, rows: dict[str, int]) -> tuple[list[Chunk], StepPlan, bool]:
    """Returns the next step's chunks, its plan, and whether it follows the last plan."""
    chunks = scheduler.schedule()
    expected = plan_step(chunks, rows, FIRST_KNOWN, BLOCK, [16])
    plan = steady.next_plan(chunks, rows, [16])
    if plan is None:
        steady.remember(chunks, expected)
        follows, plan = False, expected
    else:
        follows = True
        assert np.array_equal(plan.fields_FT, expected.fields_FT)
        assert plan.attention == expected.attention
        assert (plan.slots, plan.base_lens, plan.sampling) == (expected.slots, expected.base_lens, expected.sampling)
        assert (plan.is_greedy, plan.prompts, plan.slot_ranks) == (expected.is_greedy, [], [16])
    scheduler.launched(chunks)
    rows.clear()
    rows.update({chunk.sequence.request_id: row for row, chunk in enumerate(chunks)})
    return chunks, plan, follows


def test_steps_of_the_same_decodes_follow_the_last_plan_over_the_ends_of_blocks() -> None:
    scheduler, steady, rows = make_scheduler(), SteadyDecodes(BLOCK, FIRST_KNOWN), dict[str, int]()
    for name, num_prompt in (("one", 3), ("two", 9), ("three", 4)):
        add(scheduler, name, num_prompt)
    found = [step(scheduler, steady, rows)[2] for _ in range(12)]
    assert found == [False, False, *[True] * 10]  # the prompts, the first decodes, and the rest


def test_a_token_that_the_host_knows_is_read_from_the_plan() -> None:
    scheduler, steady, rows = make_scheduler(), SteadyDecodes(BLOCK, FIRST_KNOWN), dict[str, int]()
    first, _ = add(scheduler, "first", 5), add(scheduler, "second", 6)
    for _ in range(3):
        step(scheduler, steady, rows)
    first.tokens[-1] = 77
    _, plan, follows = step(scheduler, steady, rows)
    assert follows
    assert plan.fields_FT[:2].tolist() == [[77, -1], [FIRST_KNOWN, 1]]


def test_a_change_of_the_decodes_is_planned_from_nothing() -> None:
    scheduler, steady, rows = make_scheduler(), SteadyDecodes(BLOCK, FIRST_KNOWN), dict[str, int]()
    short, restarted = add(scheduler, "short", 5, max_tokens=6), add(scheduler, "restarted", 5)
    for _ in range(4):
        step(scheduler, steady, rows)
    for _ in range(3):
        last = step(scheduler, steady, rows)
    assert not last[2]  # the short one has all of its tokens
    scheduler.finish(short)
    assert step(scheduler, steady, rows)[2]
    before = restarted.next_chunk
    restarted.tokens[-1] = 8
    restarted.tokens[:] = [token if token >= 0 else 8 for token in restarted.tokens]
    scheduler.preempt(restarted)
    assert restarted.next_chunk is None
    step(scheduler, steady, rows)
    chunks, _, follows = step(scheduler, steady, rows)
    assert not follows
    assert chunks == [restarted.next_chunk] and chunks[0] is not before


def test_a_sequence_that_resumes_from_its_cached_blocks_is_planned_from_nothing() -> None:
    """All of its tokens but the last are in the cache. So its chunk equals that of the last plan."""
    scheduler, steady, rows = make_scheduler(), SteadyDecodes(BLOCK, FIRST_KNOWN), dict[str, int]()
    resumed = add(scheduler, "resumed", 2 * BLOCK - 1)
    for token in (5, 6):
        step(scheduler, steady, rows)
        resumed.tokens[-1] = token
    scheduler.commit(resumed, 2 * BLOCK)
    scheduler.preempt(resumed)
    chunks, _, follows = step(scheduler, steady, rows)
    assert chunks == [Chunk(resumed, 1)]
    assert not follows

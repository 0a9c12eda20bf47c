from __future__ import annotations

import time

import numpy as np
import pytest

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.messages import GPUSteps
from lorafleet.protocol.step_metrics import StepMetrics, StepShape
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, StepPlan
from lorafleet.workers.step.gpu_step_clock import GPUStepClock


def plan(query_lens: list[int], slots: list[int], base_lens: list[int], sampling: list[int]) -> StepPlan:
    tables = [[0] for _ in query_lens]
    attention = AttentionBatch(query_lens, query_lens, tables)
    fields = np.zeros((FIELDS, sum(query_lens)), np.int64)
    return StepPlan(fields, attention, slots, base_lens, sampling, True, [], [8, 8])


def test_a_steps_shape_tells_prompts_from_decodes_and_whose_tokens_use_an_adapter() -> None:
    decode = plan([1, 1, 1], [0, BASE_SLOT, 1], [0, 1, 0], [0, 1, 2])
    assert decode.shape == StepShape("decode", 3, 3, 2)
    # Of the second prompt's five tokens an activated LoRA begins to work at the third.
    prefill = plan([1, 5, 4], [0, 1, BASE_SLOT], [0, 2, 4], [0, 5])
    assert prefill.shape == StepShape("prefill", 3, 10, 4, 1, ((5, 5), (4, 4)))


def test_a_step_of_decodes_with_drafts_is_no_step_with_prompts() -> None:
    drafted = plan([1, 3, 2], [0, 1, BASE_SLOT], [0, 0, 0], [0, 1, 2, 3, 4, 5])
    assert drafted.shape == StepShape("decode", 3, 6, 4)
    assert not drafted.is_decode, "a CUDA graph for decodes has one token of each"
    beside = plan([1, 3, 5], [0, 1, BASE_SLOT], [0, 0, 0], [0, 1, 2, 3, 8])
    assert beside.shape == StepShape("prefill", 3, 9, 4, 1, ((3, 3), (5, 5)))


def test_a_prompt_s_later_tokens_are_counted_with_the_context_at_their_end() -> None:
    attention = AttentionBatch([1, 3], [20, 13], [[0], [0]])
    late = StepPlan(np.zeros((FIELDS, 4), np.int64), attention, [0, 0], [0, 0], [0], True, [], [8])
    assert late.shape == StepShape("prefill", 2, 4, 4, 20, ((3, 13),))


def test_a_step_that_was_begun_under_another_counts_from_that_ones_end() -> None:
    metrics = StepMetrics()
    began = time.perf_counter() - 10.0
    assert metrics.ended(StepShape("prefill", 2, 40, 40), began) >= 10.0
    assert metrics.ended(StepShape("decode", 2, 2, 0), began) < 9.0
    stats = metrics.stats([])
    assert stats.seconds["prefill"].total >= 10.0
    assert stats.seconds["decode"].total < 9.0, "not the first step's time again"
    assert (stats.base_tokens, stats.adapter_tokens, stats.adapter_steps) == (2, 40, 1)
    assert (sum(stats.tokens.counts), stats.tokens.total) == (2, 42)
    assert metrics.num_steps == 2


class Device:
    """A clock in milliseconds, and whether what was queued on it has run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle = True

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self._device.now

    def query(self) -> bool:
        return self._device.idle

    def elapsed_time(self, end: Event) -> float:
        assert self._device.idle, "asking a device that still runs would wait for it"
        return end.at - self.at


def test_the_gpus_clock_times_one_step_in_so_many_and_never_waits_for_it() -> None:
    device = Device()
    clock = GPUStepClock(4, device.event)
    shape = StepShape("decode", 5, 5, 2)

    def steps(count: int) -> int:
        timed = 0
        for _ in range(count):
            if clock.begin():
                device.now += 6.0
                clock.end(shape)
                timed += 1
        return timed

    assert steps(8) == 2
    assert clock.totals() == [GPUSteps("decode", True, 8, 2, pytest.approx(0.012))]  # type: ignore[arg-type]  # of pytest
    assert steps(4) == 1
    device.idle = False
    assert steps(4) == 0, "the last one that was timed has not ended"
    assert clock.totals()[0].count == 2
    device.idle = True
    assert steps(4) == 1
    assert clock.totals() == [GPUSteps("decode", True, 8, 4, pytest.approx(0.024))]  # type: ignore[arg-type]  # of pytest

"""How many prompt tokens steps have, on a simulated device and in its time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from lorafleet.workers.schedule.step_budget import LEAST_CHUNK, StepLimits
from lorafleet.workers.schedule.step_tiles import StepTiles
from tests.workers.schedule.simulated_device import (
    GRAPH_SIZES,
    H100,
    H200,
    Device,
    Load,
    Simulation,
    closed_loop,
    percentile,
)

TILES = StepTiles(GRAPH_SIZES, 1)
FIXED = StepLimits(max_tokens=2048, max_mixed_tokens=512)
DEFAULT = StepLimits(max_tokens=2048, max_gap_s=0.05, ttft_target_s=0.5, tiles=TILES)

STAIRCASE = replace(DEFAULT, tiles=StepTiles(GRAPH_SIZES, 128))
STEADY = replace(STAIRCASE, max_gap_s=0.04)


def load(limits: StepLimits, streams: int, requests: int) -> Load:
    rng = random.Random(1)
    return closed_loop(Simulation(limits, H200(noise=lambda: rng.gauss(1, 0.02))), streams, requests)


def streaming(limits: StepLimits, streams: int = 32, device: Device | None = None) -> Simulation:
    """A simulation with streams that have begun."""
    simulation = Simulation(limits, device)
    for _ in range(streams):
        simulation.send(512, 100_000)
    for _ in range(40):
        simulation.driven.step()
    simulation.steps.clear()
    return simulation


def test_many_streams_get_more_tokens_and_much_sooner_than_with_a_fixed_budget():
    ours, fixed = load(DEFAULT, 256, 1024), load(FIXED, 256, 1024)
    assert ours.tokens_per_s > 1.02 * fixed.tokens_per_s
    assert median(ours.ttft_ms) < 0.3 * median(fixed.ttft_ms)
    assert median(ours.ttft_ms) < 500
    assert percentile(ours.gap_ms, 0.99) <= 50


def test_fewer_streams_have_small_gaps_and_no_fewer_tokens():
    ours, fixed = load(DEFAULT, 64, 448), load(FIXED, 64, 448)
    assert ours.tokens_per_s > 0.98 * fixed.tokens_per_s
    assert median(ours.ttft_ms) < 100
    assert percentile(ours.gap_ms, 0.99) <= 25


def test_chunks_of_a_long_prompt_shrink_as_its_context_grows():
    alone_s = (alone := Simulation(DEFAULT)).first_token_s(alone.send(131_000, 2))
    simulation = streaming(DEFAULT)
    took_s = simulation.first_token_s(simulation.send(131_000, 2))
    assert alone_s > 0.7 * took_s
    seconds = [seconds for _, seconds in simulation.steps]
    assert percentile(seconds, 0.95) < 0.04
    assert max(seconds) < 0.05
    chunks = [shape.num_tokens - 32 for shape, _ in simulation.steps]
    assert median(chunks[-20:]) < 0.6 * median(chunks[1:20])


def test_steps_are_short_while_no_prompt_is_behind():
    simulation = streaming(DEFAULT)
    simulation.first_token_s(simulation.send(4000, 2))
    assert max(seconds for _, seconds in simulation.steps) < 0.4 * 0.05


def test_a_lower_target_starts_requests_sooner_and_a_lower_gap_shortens_steps():
    def burst(limits: StepLimits) -> tuple[float, float]:
        simulation = streaming(limits, 128)
        sent = [simulation.send(512, 2) for _ in range(20)]
        last_s = max(simulation.first_token_s(sequence) for sequence in sent)
        return last_s, max(seconds for _, seconds in simulation.steps)

    patient, hasty = StepLimits(2048, None, 0.05, 5.0, TILES), StepLimits(2048, None, 0.05, 0.1, TILES)
    steady = StepLimits(2048, None, 0.02, 0.1, TILES)
    assert burst(hasty)[0] < 0.9 * burst(patient)[0]
    assert burst(patient)[1] < 0.8 * burst(hasty)[1]
    assert burst(steady)[1] < 0.025


def test_the_gap_is_kept_though_the_host_is_busy_now_and_then():
    rng = random.Random(5)
    simulation = streaming(DEFAULT, 128, H200(noise=lambda: 20.0 if rng.random() < 0.02 else rng.gauss(1, 0.03)))
    for _ in range(60):
        simulation.send(2000, 2)
    while len(simulation.driven.finished) < 60:
        simulation.driven.step()
    ordinary = [seconds for _, seconds in simulation.steps if seconds < 0.1]
    assert percentile(ordinary, 0.99) < 0.06
    assert len(ordinary) > 0.9 * len(simulation.steps)


def test_neither_streams_nor_prompts_starve_where_a_decode_alone_takes_longer_than_the_gap():
    slow = H200(speed=0.02)
    simulation = streaming(DEFAULT, 4, slow)
    prompt = simulation.send(1000, 2)
    simulation.first_token_s(prompt)
    chunks = [shape.num_tokens - 4 for shape, _ in simulation.steps[1:]]
    assert all(count > 0 for count in chunks), "every step has tokens of the prompt"
    assert median(chunks) >= LEAST_CHUNK
    assert max(seconds for _, seconds in simulation.steps[3:]) < 0.8, "a step of 4 decodes takes 0.23 s"


def test_a_fixed_limit_is_kept_whatever_there_is_time_for():
    simulation = streaming(StepLimits(2048, 256, max_gap_s=1.0, ttft_target_s=0.001), 8)
    simulation.first_token_s(simulation.send(4000, 2))
    assert max(shape.num_tokens for shape, _ in simulation.steps) == 256


def test_steps_fill_the_graphs_that_they_run():
    simulation = streaming(DEFAULT, 50)
    simulation.first_token_s(simulation.send(20_000, 2))
    full = [shape.num_tokens for shape, _ in simulation.steps if shape.kind == "prefill"][:-1]
    assert sum(count in GRAPH_SIZES for count in full) > 0.9 * len(full)


def test_a_machine_of_which_nothing_is_known_begins_with_small_steps_beside_streams():
    simulation = Simulation(StepLimits(8192, None, 10.0, 0.001, TILES))
    for _ in range(4):
        simulation.send(16, 100_000)
    simulation.driven.step()
    simulation.send(20_000, 2)
    sizes = [sum(chunk.num_tokens for chunk in simulation.driven.step()) for _ in range(8)]
    assert sizes[0] <= 512
    assert all(after <= 2 * max(512, before) for before, after in pairwise(sizes))
    assert max(sizes) > 2048


@pytest.mark.parametrize("limits", [FIXED, DEFAULT], ids=["fixed", "default"])
def test_where_nothing_streams_a_prompt_has_the_whole_step(limits):
    simulation = Simulation(limits)
    simulation.send(10_000, 2)
    assert [chunk.num_tokens for chunk in simulation.driven.step()] == [2048]


def gauss(spread: float, seed: int = 1) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.gauss(1, spread)


def test_a_long_prompt_keeps_most_of_its_speed_amid_streams_where_attention_takes_whole_tiles():
    alone_s = (alone := Simulation(STEADY, H100(gauss(0.03)))).first_token_s(alone.send(131_000, 2))
    simulation = streaming(STEADY, device=H100(gauss(0.03)))
    took_s = simulation.first_token_s(simulation.send(131_000, 2))
    assert alone_s > 0.7 * took_s
    assert percentile([seconds for _, seconds in simulation.steps], 0.99) < 0.04
    late = [shape.prompts[0][0] for shape, _ in simulation.steps[-100:-1]]
    assert sum(count % 128 == 0 for count in late) > 0.9 * len(late), "chunks fill their tiles"


@pytest.mark.parametrize("spread", [0.02, 0.06, 0.1])
def test_gaps_leave_room_for_the_spread_of_steps(spread):
    ours = closed_loop(Simulation(STAIRCASE, H100(gauss(spread))), 256, 768)
    assert percentile(ours.gap_ms, 0.99) <= 50
    assert percentile(ours.gap_ms, 0.99) > 35, "the time that is left is used"


def test_gaps_keep_their_bound_after_the_device_has_become_slower():
    noise, num_steps = gauss(0.03), 0

    def slower() -> float:
        nonlocal num_steps
        num_steps += 1
        return noise() * (1.5 if num_steps > 400 else 1.0)

    simulation = streaming(STAIRCASE, 128, H100(slower))
    for _ in range(400):
        simulation.send(2000, 2)
    while len(simulation.driven.finished) < 400:
        simulation.driven.step()
    before, after = simulation.steps[:300], simulation.steps[400:]
    assert len(after) > 100
    for part in (before, after):
        assert percentile([seconds for _, seconds in part], 0.99) <= 0.05

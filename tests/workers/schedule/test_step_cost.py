from __future__ import annotations

import random

import pytest

from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.schedule.step_cost import FIRST_TOKENS, MOST_SPREAD, StepCost, StepCostFit
from lorafleet.workers.schedule.step_tiles import StepTiles

TILES = StepTiles((64, 128, 256, 512, 1024, 2048), 128)
TRUE = StepCost(step=1e-3, token=20e-6, adapter_token=4e-6, position=30e-9, pair=2e-9)


def random_step(rng: random.Random) -> StepShape:
    """Decodes beside a chunk of a prompt."""
    num_decodes, count, context = rng.randrange(0, 200), rng.randrange(16, 2000), rng.randrange(0, 30_000)
    num_tokens = num_decodes + count
    decoded = num_decodes * rng.randrange(100, 2000)
    return StepShape(
        "prefill", num_decodes + 1, num_tokens, rng.randrange(num_tokens), decoded, ((count, context + count),)
    )


def seconds(cost: StepCost, shape: StepShape, tiles: StepTiles = TILES) -> float:
    return (
        cost.step
        + cost.token * tiles.tokens(shape.num_tokens)
        + cost.adapter_token * shape.num_adapter_tokens
        + cost.position * shape.decode_positions
        + cost.pair * sum(tiles.pairs(count, end - count) for count, end in shape.prompts)
    )


def fitted(
    rng: random.Random, slowness: float = 1.0, num_steps: int = 200, tiles: StepTiles = TILES, noise: float = 0.02
) -> StepCostFit:
    fit = StepCostFit(tiles)
    for _ in range(num_steps):
        shape = random_step(rng)
        fit.observe(shape, slowness * seconds(TRUE, shape) * rng.gauss(1, noise))
    return fit


def largest_error(rng: random.Random, tiles: StepTiles) -> float:
    """The largest error of 50 predictions, as a share, by a fit that is told these tiles of a device without noise."""
    fit, shapes = fitted(rng, tiles=tiles, noise=0.0), [random_step(rng) for _ in range(50)]
    return max(abs(seconds(fit.cost, shape, tiles) / seconds(TRUE, shape) - 1) for shape in shapes)


@pytest.mark.parametrize("slowness", [0.1, 1.0, 30.0, 1000.0])
def test_the_time_of_a_step_is_learned_on_fast_machines_and_slow_ones(slowness):
    rng = random.Random(1)
    fit = fitted(rng, slowness)
    for _ in range(50):
        shape = random_step(rng)
        assert seconds(fit.cost, shape) == pytest.approx(slowness * seconds(TRUE, shape), rel=0.15, abs=1e-3)


def test_a_few_steps_suffice_to_predict_steps_that_are_alike():
    fit, alike = StepCostFit(TILES), StepShape("prefill", 33, 512, 0, 20_000, ((480, 480),))
    for _ in range(4):
        fit.observe(alike, 9e-3)
    assert seconds(fit.cost, alike) == pytest.approx(9e-3, rel=0.05)


def test_a_step_during_which_the_host_was_busy_changes_little():
    rng = random.Random(2)
    fit = fitted(rng)
    shape = random_step(rng)
    expected = seconds(fit.cost, shape)
    fit.observe(shape, 100 * expected)
    assert seconds(fit.cost, shape) == pytest.approx(expected, rel=0.3)


def test_a_lasting_change_is_believed_after_a_few_steps():
    rng = random.Random(3)
    fit = fitted(rng)
    for _ in range(10):
        shape = random_step(rng)
        fit.observe(shape, 5 * seconds(TRUE, shape))
    for _ in range(20):
        shape = random_step(rng)
        assert seconds(fit.cost, shape) == pytest.approx(5 * seconds(TRUE, shape), rel=0.3)


def test_nothing_makes_a_coefficient_negative_or_unbounded():
    rng = random.Random(4)
    fit = StepCostFit(TILES)
    for _ in range(500):
        fit.observe(random_step(rng), rng.choice((0.0, 1e-6, 1e-3, 1.0, 1000.0)))
        cost = fit.cost
        for value in (cost.step, cost.token, cost.adapter_token, cost.position, cost.pair):
            assert 0 < value < 1e6


def test_a_fit_that_knows_the_tiles_of_a_device_predicts_its_staircases():
    assert largest_error(random.Random(6), TILES) < 0.02
    assert largest_error(random.Random(6), StepTiles()) > 0.1


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.1])
def test_the_spread_of_steps_is_learned(noise):
    fit = fitted(random.Random(7), num_steps=600, noise=noise)
    assert fit.spread == pytest.approx(noise, rel=0.4, abs=0.005)


def test_the_spread_is_bounded_and_rare_outliers_hardly_widen_it():
    rng = random.Random(8)
    fit = fitted(rng, num_steps=600)
    before = fit.spread
    fit.observe(shape := random_step(rng), 100 * seconds(TRUE, shape))
    assert fit.spread < before + 0.05
    for _ in range(500):
        fit.observe(shape := random_step(rng), rng.choice((0.1, 10.0)) * seconds(TRUE, shape))
        assert fit.spread <= MOST_SPREAD


def test_a_step_is_trusted_to_have_twice_the_tokens_of_those_before():
    fit = StepCostFit(TILES)
    assert fit.trusted_tokens == FIRST_TOKENS
    fit.observe(StepShape("prefill", 1, 700, 0, 0, ((700, 700),)), 15e-3)
    assert fit.trusted_tokens == 1400


def test_steps_of_decodes_alone_are_not_learned_from():
    fit = StepCostFit(TILES)
    fit.observe(StepShape("decode", 64, 64, 0), 1.0)
    assert fit.cost == StepCostFit(TILES).cost


@pytest.mark.parametrize("adapted", [0.0, 1.0])
def test_steps_that_are_alike_do_not_make_a_token_cost_anything(adapted: float) -> None:
    """With steps of nearly one size, the fit cannot tell what a token takes from what a step takes."""
    for seed in range(20):
        rng, fit = random.Random(seed), StepCostFit(TILES)
        for _ in range(60):
            count = rng.choice((100, 120, 128))
            shape = StepShape("prefill", 64, 63 + count, round(adapted * (63 + count)), 63 * 200, ((count, count),))
            fit.observe(shape, 8.5e-3 * rng.uniform(0.9, 1.2))
        assert fit.token_s < 1.2 * 8.5e-3 / 128
    assert fitted(random.Random(1)).token_s == pytest.approx(TRUE.token + 0.5 * TRUE.adapter_token, rel=0.15)

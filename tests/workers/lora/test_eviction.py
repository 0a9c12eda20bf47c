from __future__ import annotations

import pytest

from lorafleet.workers.lora.eviction import HALF_LIFE, REMEMBERED, Demand


def test_a_request_counts_half_after_so_many_others() -> None:
    demand = Demand(2)
    for _ in range(4):
        demand.count("a")
    assert demand.of("a") == pytest.approx(4, rel=0.1)
    for _ in range(2 * HALF_LIFE):
        demand.count("b")
    assert demand.of("a") == pytest.approx(2, rel=0.1)
    assert demand.of("never") == 0.0


def test_demand_is_the_same_before_and_after_its_weights_are_scaled_down() -> None:
    demand = Demand(1)
    for i in range(100 * HALF_LIFE * 4):  # 2 ** 400
        demand.count("ab"[i % 2])
    assert demand.of("a") == pytest.approx(demand.of("b"), rel=0.05)
    assert demand.of("a") == pytest.approx(HALF_LIFE / 0.693 / 2, rel=0.05)


def test_only_so_many_are_remembered_and_the_hot_ones_stay() -> None:
    demand = Demand(1)
    for i in range(10 * REMEMBERED):
        demand.count(f"cold{i}")
        if i % 8 == 0:
            demand.count("hot")
    assert demand.of("hot") > 3
    assert demand.of("cold0") == 0.0
    assert len(demand._sums) <= REMEMBERED

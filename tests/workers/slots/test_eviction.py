from __future__ import annotations

import pytest

from lorafleet.workers.slots.eviction import HALF_LIFE, REMEMBERED, Credits, Demand


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


def test_ever_new_adapters_of_the_same_size_do_not_drive_out_those_that_are_asked_for_again() -> None:
    demand = Demand(8)
    tier = Credits(demand)
    hot, held = [f"hot{number}" for number in range(4)], dict.fromkeys([f"hot{number}" for number in range(4)])
    misses = 0

    def ask(digest: str) -> None:
        nonlocal misses
        demand.count(digest)
        if digest not in held:
            misses += digest in hot
            if len(held) == 8:
                victim = min(held, key=tier.of)
                tier.evict(victim)
                del held[victim]
            held[digest] = None
        tier.use(digest, 1000)

    for digest in hot * 5:
        ask(digest)
    for number in range(1000):
        ask(f"new{number}")
        if number % 5 == 0:
            ask(hot[number // 5 % 4])
    assert misses == 0

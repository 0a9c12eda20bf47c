"""What KV blocks and adapters are worth, in one unit."""

from __future__ import annotations

import pytest

from lorafleet.workers.pool.pool_cost import (
    LEAST_REMEMBERED,
    RECENT_S,
    AdapterUse,
    PoolCosts,
    RecentRequests,
    pays,
    worth_of_adapter,
)

COSTS = PoolCosts(block_s=352e-6, share=0.5)  # 16 tokens of an 8B model on one H200.


def test_a_block_is_worth_less_the_longer_it_is_idle_and_the_fewer_return() -> None:
    assert COSTS.worth_of_block(0) > COSTS.worth_of_block(10) > COSTS.worth_of_block(1000) > 0
    assert PoolCosts(352e-6, 0.1).worth_of_block(0) == pytest.approx(COSTS.worth_of_block(0) / 5)
    assert PoolCosts(35e-6, 0.5).worth_of_block(0) < COSTS.worth_of_block(0), "it is quickly there again"


def test_a_block_is_used_no_more_often_than_its_adapter() -> None:
    busy, cold = AdapterUse(uses_per_s=100.0), AdapterUse(uses_per_s=0.0)
    assert COSTS.worth_of_block(1, busy) == COSTS.worth_of_block(1)
    assert COSTS.worth_of_block(1, cold) == 0


def test_blocks_of_an_adapter_that_must_be_read_again_are_worth_less() -> None:
    here, small, large = (AdapterUse(100.0, missing_bytes) for missing_bytes in (0, 40 << 20, 340 << 20))
    assert COSTS.worth_of_block(1, here) > COSTS.worth_of_block(1, small) > COSTS.worth_of_block(1, large) > 0


def test_an_adapter_is_worth_its_requests_and_its_size() -> None:
    assert worth_of_adapter(2.0, 100) == 2 * worth_of_adapter(1.0, 100) == worth_of_adapter(1.0, 200)


def test_memory_moves_for_nothing_to_lose_or_for_twice_as_much() -> None:
    assert pays(0.0, 0.0) and pays(2.0, 1.0)
    assert not pays(1.9, 1.0) and not pays(0.0, 0.1)
    assert not (pays(1.5, 1.0) or pays(1.0, 1.5)), "what has just moved does not move back"


def test_requests_fade() -> None:
    now_s = 100.0
    requests = RecentRequests(lambda: now_s)
    for _ in range(60):
        requests.count("a")
    assert requests.per_s("a") == pytest.approx(60 / RECENT_S)
    now_s += 10 * RECENT_S
    assert 0 < requests.per_s("a") < 1e-3 and requests.per_s("b") == 0


def test_a_size_is_known_as_soon_as_the_adapter_was_in_host_memory() -> None:
    requests = RecentRequests(lambda: 0.0)
    requests.count("a")
    assert requests.use_of("a", is_here=False).missing_bytes == 0
    requests.count("a", 500)
    requests.count("a")
    assert requests.use_of("a", is_here=False).missing_bytes == 500
    assert requests.use_of("a", is_here=True).missing_bytes == 0


def test_adapters_without_recent_requests_are_forgotten() -> None:
    now_s = 0.0
    requests = RecentRequests(lambda: now_s)
    for i in range(LEAST_REMEMBERED):
        requests.count(str(i), 5)
    now_s = 20 * RECENT_S
    requests.count("new", 5)
    assert requests.use_of("0", is_here=False).missing_bytes == 0
    assert requests.use_of("new", is_here=False).missing_bytes == 5

from __future__ import annotations

import pytest

from eviction import lru_reads, tier_reads, trace


@pytest.mark.parametrize(("kind", "most"), [("zipf", 0.90), ("scan", 0.90), ("shift", 0.95)])
def test_the_cpu_tier_reads_less_again_than_lru_does(kind: str, most: float) -> None:
    requests = list(trace(kind, 1.1, 15_000, seed=3))
    lru, ours = lru_reads(requests, 32), tier_reads(requests, 32)
    assert ours.count < most * lru.count
    assert ours.rank < most * lru.rank

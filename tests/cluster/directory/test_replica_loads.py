"""The load and the bytes of replicas, compared with their fair shares."""

from __future__ import annotations

import pytest

from lorafleet.cluster.directory.replica_loads import ReplicaLoads


@pytest.fixture
def loads() -> ReplicaLoads:
    """Two replicas, of which the second warms up. Their fair shares are 10 and 5 of the load, 100 and 50 bytes."""
    loads = ReplicaLoads({"warm": 1.0, "new": 0.5})
    loads.set_total_load(15.0)
    loads.set_total_bytes(150)
    return loads


def test_an_adapter_fits_if_neither_load_nor_bytes_exceed_the_bound(loads: ReplicaLoads) -> None:
    loads.count("warm", 8.0, 80)
    assert loads.fits("warm", 4.0, 40, bound=1.2)
    assert not loads.fits("warm", 4.1, 40, bound=1.2)
    assert not loads.fits("warm", 4.0, 41, bound=1.2)
    loads.count("warm", -8.0, -80)
    assert loads.fits("warm", 12.0, 120, bound=1.2)


def test_any_adapter_fits_into_a_replica_that_has_nothing(loads: ReplicaLoads) -> None:
    assert loads.fits("new", 1000.0, 10_000, bound=1.0)
    loads.count("new", 1000.0, 10_000)
    assert not loads.fits("new", 1.0, 1, bound=1.0)


def test_the_emptiest_replica_has_the_smallest_part_of_its_own_share(loads: ReplicaLoads) -> None:
    loads.count("warm", 6.0, 0)
    loads.count("new", 4.0, 0)
    assert loads.emptiest(excluded=()) == "warm"
    assert loads.emptiest(excluded=("warm",)) == "new"
    loads.count("warm", 0.0, 50)
    assert loads.emptiest(excluded=()) == "new"


def test_excess_is_above_one_if_load_or_bytes_are_more_than_the_share_allows(loads: ReplicaLoads) -> None:
    loads.count("new", 6.0, 90)
    assert loads.excess("new", leave=2.0) == pytest.approx(0.9)
    assert loads.excess("new", leave=1.5) == pytest.approx(1.2)
    assert loads.excess("warm", leave=1.5) == 0.0


def test_nothing_exceeds_a_share_that_is_not_known_yet() -> None:
    loads = ReplicaLoads({"a": 1.0})
    loads.count("a", 5.0, 5)
    assert loads.excess("a", leave=1.5) == 0.0

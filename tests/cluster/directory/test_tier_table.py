"""The table of tiers, looked up by replica and by adapter."""

from __future__ import annotations

from lorafleet.cluster.directory.tier_table import TierTable


def table() -> TierTable:
    tiers = TierTable()
    for replica_id in ("a", "b"):
        tiers.add_replica(replica_id)
        tiers.set_tier(replica_id, "x", "gpu")
    tiers.set_tier("a", "y", "disk")
    tiers.set_tier("a", "x", "cpu")
    return tiers


def test_a_tier_is_found_by_replica_and_by_adapter() -> None:
    tiers = table()
    assert tiers.held("a") == {"x": "cpu", "y": "disk"}
    assert tiers.holders("x") == {"a": "cpu", "b": "gpu"}
    assert tiers.rows == [("a", "x", "cpu"), ("a", "y", "disk"), ("b", "x", "gpu")]
    assert (tiers.held("nobody"), tiers.holders("nothing")) == ({}, {})


def test_an_adapter_is_unknown_once_its_last_holder_has_dropped_it() -> None:
    tiers = table()
    assert not tiers.set_tier("a", "x", None)
    assert tiers.holders("x") == {"b": "gpu"}
    assert tiers.set_tier("b", "x", None), "the last one"
    assert tiers.digests == {"y"}
    tiers.drop_replica("b")
    assert tiers.rows == [("a", "y", "disk")]


def test_only_the_first_holder_makes_an_adapter_known() -> None:
    tiers = table()
    assert tiers.set_tier("b", "new", "disk")
    assert not tiers.set_tier("b", "new", "cpu")
    assert not tiers.set_tier("a", "new", "cpu")


def test_the_number_held_counts_an_adapter_once_for_each_of_its_holders() -> None:
    tiers = table()
    assert tiers.num_held == 3
    tiers.set_tier("a", "x", "gpu")
    tiers.set_tier("a", "y", None)
    assert tiers.num_held == 2

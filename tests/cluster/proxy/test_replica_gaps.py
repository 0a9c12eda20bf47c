"""How long applications were without a replica, on a clock that the test sets."""

from __future__ import annotations

from lorafleet.cluster.proxy.replica_gaps import ReplicaGaps
from lorafleet.cluster.proxy.waiting_room import EXPECTED_S


def test_the_last_gap_that_ended_with_a_replica_is_what_clients_are_told_to_expect() -> None:
    now_s = 0.0
    gaps = ReplicaGaps(lambda: now_s)
    gaps.update({"a", "b"}, {"b"})
    now_s = 28.4
    gaps.update({"a", "b"}, set())
    assert gaps.expected_s == EXPECTED_S
    gaps.update({"a", "b"}, {"a"})
    assert gaps.expected_s == 28
    now_s = 100.0
    gaps.update({"a"}, {"a"})
    gaps.update({"a", "b"}, {"a", "b"})
    assert gaps.expected_s == 28, "b was deleted, which is no start"
    gaps.update({"a", "b"}, {"b"})
    gaps.update({"a", "b"}, {"a", "b"})
    assert gaps.expected_s == 1

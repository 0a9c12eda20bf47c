from __future__ import annotations

import pytest

from lorafleet.cluster.directory.former_holders import MAX_REPLICAS, FormerHolders
from lorafleet.cluster.directory.neighbors import MAX_NEIGHBORS, Neighbor, Neighbors
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.resolvers.neighbor_wire import NeighborAddress


class Cluster:
    """Replicas, each by itself on a node of the same name in capitals, unless `nodes` has another one."""

    def __init__(self, replicas: str, **nodes: str) -> None:
        self.residency = Residency("e")
        self.neighbors = Neighbors(self.residency)
        self.sequence = 0
        for replica in replicas:
            node = nodes.get(replica, replica.upper())
            self.neighbors.register(replica, Neighbor(node, NeighborAddress(replica, 1, "secret")))
            self.hold(replica)

    def hold(self, replica: str, **tiers: Tier) -> None:
        self.sequence += 1
        self.residency.accept(Report(replica, self.sequence, True, dict(tiers), ReplicaLoad()))

    def hosts(self, replica: str, digest: str = "x") -> list[str]:
        return [address.host for address in self.neighbors.of(replica, digest)]


def test_replicas_that_hold_an_adapter_come_before_those_that_held_it_and_those_that_load_it() -> None:
    cluster = Cluster("abcd")
    cluster.hold("b", x="coming")
    cluster.hold("c", x="cpu")
    cluster.hold("c")
    cluster.hold("d", x="gpu")
    assert cluster.hosts("a") == ["d", "c", "b"]
    assert cluster.hosts("d") == ["c", "b"], "a replica is no neighbor of its own"
    assert cluster.hosts("a", "unheard-of") == []


def test_replicas_of_one_node_share_a_cache() -> None:
    cluster = Cluster("abc", a="N", b="N", c="M")
    cluster.hold("b", x="gpu")
    assert cluster.hosts("a") == [] and cluster.hosts("c") == ["b"]
    cluster.hold("a", x="cpu")
    assert len(cluster.hosts("c")) == 1, "one address for each node"


def test_a_replica_that_left_or_does_not_take_part_is_no_neighbor() -> None:
    cluster = Cluster("abc")
    cluster.hold("b", x="gpu")
    cluster.hold("c", x="gpu")
    cluster.neighbors.register("b", None)
    assert cluster.hosts("a") == ["c"] and cluster.hosts("b") == []
    cluster.residency.forget("c")
    assert cluster.hosts("a") == ["c"], "its cache may outlive what it reported"
    cluster.neighbors.register("c", None)
    assert cluster.hosts("a") == []


def test_holders_are_asked_in_turn_and_an_answer_is_bounded() -> None:
    cluster = Cluster("abcdefgh")
    for replica in "bcdefgh":
        cluster.hold(replica, x="gpu")
    answers = [tuple(cluster.hosts("a")) for _ in range(200)]
    assert {len(answer) for answer in answers} == {MAX_NEIGHBORS}
    assert {answer[0] for answer in answers} == set("bcdefgh")


def test_the_latest_former_holders_are_remembered() -> None:
    former = FormerHolders(max_adapters=2)
    for replica in "abcdb":
        former.record("x", replica)
    assert former.of("x") == ("b", "d", "c") and len(former.of("x")) == MAX_REPLICAS
    former.record("y", "a")
    former.record("z", "a")
    assert former.of("x") == () and former.of("z") == ("a",)


@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_an_adapter_that_was_evicted_from_memory_is_still_found(tier: Tier) -> None:
    cluster = Cluster("ab")
    cluster.hold("b", x=tier)
    cluster.hold("b")
    assert cluster.hosts("a") == ["b"]

"""Knows which replicas' nodes probably have an adapter's files in their caches, where other nodes can fetch them.

A replica that holds an adapter in memory has read it from its node's cache, where it usually still is. If it is no
longer there, one request of resolvers/neighbor_fetch.py is wasted.
"""

from __future__ import annotations

import random

import msgspec

from lorafleet.cluster.directory.residency import Residency
from lorafleet.resolvers.neighbor_wire import NeighborAddress

MAX_NEIGHBORS = 4  # Addresses in one answer.
_LAST = "coming"  # The tier of adapters whose files may still be on their way.


class Neighbor(msgspec.Struct, frozen=True):
    """The node of a replica, and its address for neighbors. Replicas of one node share a cache and are no neighbors."""

    node_id: str
    address: NeighborAddress


class Neighbors:
    """The replicas that answer neighbors."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._known: dict[str, Neighbor] = {}  # By replica.

    def register(self, replica_id: str, neighbor: Neighbor | None) -> None:
        """Records where a replica answers; None if it does not."""
        if neighbor is None:
            self._known.pop(replica_id, None)
        else:
            self._known[replica_id] = neighbor

    def of(self, replica_id: str, digest: str) -> list[NeighborAddress]:
        """Returns addresses on other nodes than the replica's that probably have the adapter, the best first. Equally
        good ones come in a random order, so that many replicas that need an adapter at once ask different nodes."""
        own = self._known.get(replica_id)
        if own is None:
            return []
        holders = self._residency.holders(digest)
        present = [replica for replica, tier in holders.items() if tier != _LAST]
        random.shuffle(present)
        coming = [replica for replica, tier in holders.items() if tier == _LAST]
        ordered = dict.fromkeys([*present, *self._residency.former.of(digest), *coming])
        by_node: dict[str, NeighborAddress] = {}
        for neighbor in [self._known[replica] for replica in ordered if replica in self._known]:
            if neighbor.node_id != own.node_id:
                by_node.setdefault(neighbor.node_id, neighbor.address)
        return list(by_node.values())[:MAX_NEIGHBORS]

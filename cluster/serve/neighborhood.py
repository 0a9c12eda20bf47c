"""Connects a replica to its neighbors, the replicas on other nodes. Each sends adapters from its node's cache."""

from __future__ import annotations

import secrets

import ray

from lorafleet.cluster.directory.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.directory.directory_calls import NeighborsCall
from lorafleet.cluster.directory.directory_socket import listen
from lorafleet.cluster.directory.neighbors import Neighbor
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.resolvers.neighbor_server import NeighborServer
from lorafleet.resolvers.neighbor_wire import NeighborAddress
from lorafleet.resolvers.store import AdapterStore

FIND_S = 1.0  # A fetch waits so long for the directory, then asks the source.


class NodeFiles:
    """The adapters' files on a replica's node: a store that fetches them, and a server that sends them to neighbors.

    Args:
        has_neighbors: Whether to fetch from other nodes, and to send to them.
    """

    def __init__(self, sources: SourcesConfig, place: DirectoryPlace, replica_id: str, *, has_neighbors: bool) -> None:
        self.store = AdapterStore(sources, neighbor_finder(place, replica_id) if has_neighbors else None)
        self.neighbor: Neighbor | None = None  # The server, as the directory tells other nodes of it.
        self.server: NeighborServer | None = None
        if has_neighbors:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
            listener, secret = listen(host, f"neighbor:{replica_id}"), secrets.token_hex(16)
            address = NeighborAddress(host, listener.getsockname()[1], secret)
            self.neighbor = Neighbor(ray.get_runtime_context().get_node_id(), address)
            self.server = NeighborServer(listener, secret, self.store.cached)

    def close(self) -> None:
        """Ends the running fetches soon, and listens no more."""
        if self.server is not None:
            self.server.close()
        self.store.stop()


def neighbor_finder(place: DirectoryPlace, replica_id: str) -> FindNeighbors:
    """Returns a function that asks the directory which neighbors of the replica have an adapter."""
    directory = get_or_create(place)
    return lambda digest: directory.ask_from_thread(NeighborsCall(replica_id, digest), FIND_S)

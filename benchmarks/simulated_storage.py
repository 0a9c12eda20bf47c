"""Simulates where the files of adapters are: on each node's disk, in S3, and in the caches of other nodes.

The times are assumptions for a cluster in one region:

- S3 answers after 0.15 s and then sends 0.7 GB/s, as eight ranges at a time of 85 to 90 MB/s each.
- Nodes have links of 25 Gbit/s. A link carries one adapter after another.
- A file is hashed once before it enters a node's cache, at 1.5 GB/s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, get_args

from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

StorageKind = Literal["local", "s3", "s3 and neighbors", "local and memory"]
KINDS: tuple[StorageKind, ...] = get_args(StorageKind)

S3_BASE_S, S3_BYTES_S = 0.15, 0.7e9
NEAR_BASE_S, LINK_BYTES_S = 0.005, 25e9 / 8
DIGEST_BYTES_S = 1.5e9


class Storage:
    """The files of all nodes, with one replica on each.

    Before the first request the caches have what a long run leaves there: each adapter is in the cache of its
    rendezvous home, as far as the home's cache has room.

    Args:
        kind: "local" has all files on every disk. "s3" has them in S3 and in the nodes' caches. "s3 and neighbors" also
            fetches from other nodes' caches. "local and memory" is "local", and also copies packed adapters from
            another replica's host memory, which the product does not do.
    """

    def __init__(self, kind: StorageKind, nodes: Sequence[str], sizes: Sequence[int], cache_bytes: int) -> None:
        self.kind = kind
        self.s3_bytes = self.near_bytes = 0
        self._sizes = sizes
        self._cached: dict[str, OrderedDict[int, None]] = {node: OrderedDict() for node in nodes}
        self._cache_bytes = cache_bytes
        self._free_bytes = dict.fromkeys(nodes, cache_bytes)
        self._link_free_s = dict.fromkeys(nodes, 0.0)
        homes = Rendezvous(dict.fromkeys(nodes, 1.0))
        for adapter in sorted(range(len(sizes)), key=lambda number: key_of(str(number))):
            home = homes.replicas[homes.home(key_of(str(adapter)))]
            if sizes[adapter] <= self._free_bytes[home]:
                self._add(home, adapter)

    @property
    def is_local(self) -> bool:
        return self.kind in ("local", "local and memory")

    def has(self, node: str, adapter: int) -> bool:
        """Returns whether the node's disk has the adapter, which is then used soon."""
        if self.is_local:
            return True
        found = adapter in self._cached[node]
        if found:
            self._cached[node].move_to_end(adapter)
        return found

    def fetch(self, node: str, adapter: int, now: float) -> float:
        """Starts to fetch an adapter, and returns the time at which it can be stored."""
        size = self._sizes[adapter]
        link_s = size / LINK_BYTES_S
        senders = [other for other, cached in self._cached.items() if adapter in cached and other != node]
        if self.kind == "s3 and neighbors" and senders:
            sender = min(senders, key=lambda other: self._link_free_s[other])
            ends_s = max(now + NEAR_BASE_S, self._link_free_s[node], self._link_free_s[sender]) + link_s
            self._link_free_s[sender] = ends_s
            self.near_bytes += size
        else:
            ends_s = max(now + S3_BASE_S + size / S3_BYTES_S, max(now, self._link_free_s[node]) + link_s)
            self.s3_bytes += size
        self._link_free_s[node] = max(now, self._link_free_s[node]) + link_s
        return ends_s + size / DIGEST_BYTES_S

    def store(self, node: str, adapter: int) -> None:
        """Adds a fetched adapter to the node's cache, which evicts the least recently used ones."""
        while self._free_bytes[node] < self._sizes[adapter]:
            evicted, _ = self._cached[node].popitem(last=False)
            self._free_bytes[node] += self._sizes[evicted]
        self._add(node, adapter)

    def empty(self, node: str) -> None:
        """Empties the node's cache, as that of a new node."""
        self._cached[node].clear()
        self._free_bytes[node] = self._cache_bytes

    def _add(self, node: str, adapter: int) -> None:
        self._cached[node][adapter] = None
        self._free_bytes[node] -= self._sizes[adapter]

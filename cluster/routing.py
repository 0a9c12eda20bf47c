"""Which replica should answer: a pure choice over the directory's table. Knows nothing of Ray."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from lorafleet.cluster.directory import RouteTable

SPILL_REQUESTS = 16  # a replica that holds the adapter may have this many requests more than another one


class ReplicaChooser:
    """Residency and load as the directory tells them, plus the choices made since it did."""

    def __init__(self) -> None:
        self.table = RouteTable(-1, {}, {}, {})
        self._chosen: Counter[str] = Counter()

    def update(self, table: RouteTable) -> None:
        self.table = table
        self._chosen.clear()

    def rank(self, adapter: str, replica_ids: Sequence[str]) -> list[str]:
        """Replicas to try, best first: in a GPU slot, in CPU memory, then the less loaded of two random ones."""
        others = sorted(random.sample(replica_ids, min(2, len(replica_ids))), key=self._num_requests)
        if not others:
            return []
        limit = self._num_requests(others[0]) + SPILL_REQUESTS
        known = set(replica_ids)
        ranked: list[str] = []
        for tier in (self.table.gpu, self.table.cpu):
            holders = [one for one in tier.get(adapter, ()) if one in known and self._num_requests(one) <= limit]
            ranked += sorted(holders, key=self._num_requests)
        return list(dict.fromkeys(ranked + others))

    def count(self, replica_id: str) -> None:
        """A request goes there now; the next table will include it."""
        self._chosen[replica_id] += 1

    def _num_requests(self, replica_id: str) -> int:
        return self.table.num_requests.get(replica_id, 0) + self._chosen[replica_id]

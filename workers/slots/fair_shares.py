"""Decides whose adapter leaves a full tier. Tenants share its places, so that nobody can evict everybody else's
adapters by requesting ever new ones.

Each adapter is charged to one tenant. A tenant that holds at least as many places as any other loses one of its own
adapters when it brings in one more. Any other tenant's new adapter takes a place from the tenant that holds the most.
Adapters of tenants that have wanted none for RECENT_S are not protected at all. With a single tenant every adapter may
be evicted, and eviction.py alone decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lorafleet.workers.slots.eviction import Demand


class FairShares:
    """Records which tenant each adapter of one tier is charged to.

    Callers without a tenant are the tenant "". A public adapter that somebody has loaded is charged to that tenant
    too, until a request uses it.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._tenant_of: dict[str, str] = {}  # by digest
        self._num_held: Counter[str] = Counter()  # by tenant

    def charge(self, digest: str, tenant: str) -> None:
        """Charges an adapter to the tenant that brings it in or uses it.

        An adapter of several tenants stays charged to the one that holds fewer places. So a tenant with many places
        cannot take over, and then evict, an adapter that others use too.
        """
        holder = self._tenant_of.get(digest)
        if holder is not None:
            if holder == tenant or (
                self._demand.is_recent(holder) and self._num_held[holder] <= self._num_held[tenant]
            ):
                return
            self.release(digest)
        self._tenant_of[digest] = tenant
        self._num_held[tenant] += 1

    def release(self, digest: str) -> None:
        holder = self._tenant_of.pop(digest, None)
        if holder is None:
            return
        self._num_held[holder] -= 1
        if not self._num_held[holder]:
            del self._num_held[holder]

    def losers(self, tenant: str, candidates: Iterable[str]) -> set[str]:
        """Returns the candidates that may be evicted so that the tenant gets one more place.

        There are none if everything that the tenant's own share allows is in use.
        """
        holders = {digest: self._tenant_of.get(digest) for digest in candidates}
        recent = {holder for holder in set(holders.values()) if holder is not None and self._demand.is_recent(holder)}
        most = max((self._num_held[holder] for holder in recent), default=0)
        own = self._num_held[tenant]
        if own and own + 1 >= most:
            losing = {tenant}
        else:
            losing = {holder for holder in recent if self._num_held[holder] == most}
        return {digest for digest, holder in holders.items() if holder not in recent or holder in losing}

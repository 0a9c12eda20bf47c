"""Decides whose adapter leaves a full tier. Tenants share its places, so that nobody can evict everybody else's
adapters by requesting ever new ones.

Each adapter is charged to one tenant. What a tenant holds is the size of its adapters: bytes in the slots, and one for
each adapter in host memory. The even share is what all tenants hold, divided by the number of those that hold any.
A tenant's new adapter takes room from the tenant that holds the most, if the new one is the tenant's only adapter, if
the tenant holds at most the even share with it and the other one more, or if it holds at most what the other one keeps.
If not, the tenant loses adapters of its own. So only a single adapter that is larger than the even share exceeds these
bounds.
Adapters of tenants that have wanted none for RECENT_S are not protected at all. With a single tenant every adapter may
be evicted, and eviction.py alone decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lorafleet.workers.slots.eviction import Demand


class FairShares:
    """Records which tenant each adapter of one tier is charged to.

    Callers without a tenant are the tenant "". A public adapter that somebody has loaded is charged to that tenant
    too, until a request uses it.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._charges: dict[str, tuple[str, int]] = {}  # tenant and size, by digest
        self._held: Counter[str] = Counter()  # sizes, by tenant

    def charge(self, digest: str, tenant: str, size: int = 1) -> None:
        """Charges an adapter to the tenant that brings it in or uses it.

        An adapter of several tenants stays charged to the one that holds less. So a tenant with much cannot take over,
        and then evict, an adapter that others use too.
        """
        holder = self.tenant_of(digest)
        if holder is not None:
            if holder == tenant or (self._demand.is_recent(holder) and self._held[holder] <= self._held[tenant]):
                return
            self.release(digest)
        self._charges[digest] = tenant, size
        self._held[tenant] += size

    def release(self, digest: str) -> None:
        if digest not in self._charges:
            return
        holder, size = self._charges.pop(digest)
        self._held[holder] -= size
        if not self._held[holder]:
            del self._held[holder]

    def holds_less(self, tenant: str, other: str) -> bool:
        return self._held[tenant] < self._held[other]

    def losers(self, tenant: str, candidates: Iterable[str], size: int = 1) -> set[str]:
        """Returns the candidates of which one may be evicted so that the tenant gets an adapter of this size.

        There are none if everything that the tenant's own share allows is in use.
        """
        return set(self._choice(tenant, candidates, size).losers())

    def in_turn(self, tenant: str, candidates: Iterable[str], size: int, gone: Iterable[str] = ()) -> Iterator[str]:
        """Yields those that may be evicted in the order of the candidates, each once `gone` and those before it are
        evicted."""
        choice = self._choice(tenant, candidates, size)
        for digest in gone:
            choice.evict(digest)
        while (loser := next(choice.losers(), None)) is not None:
            choice.evict(loser)
            yield loser

    def _choice(self, tenant: str, candidates: Iterable[str], size: int) -> _Choice:
        holders = {digest: self.tenant_of(digest) for digest in candidates}
        recent = {holder for holder in set(holders.values()) if holder is not None and self._demand.is_recent(holder)}
        if len(self._held) <= 1:  # a tenant alone has nobody to share with
            recent = set()
        return _Choice(tenant, size, self._even_share(tenant), self._held.copy(), self._charges, holders, recent)

    def _even_share(self, tenant: str) -> float:
        """Returns what each tenant would hold if this one and the recent ones held equally much."""
        return sum(self._held.values()) / len({tenant, *filter(self._demand.is_recent, self._held)})

    def is_protected(self, digest: str | None, tenant: str) -> bool:
        """Returns whether the adapter is charged to another tenant that has recently wanted adapters."""
        holder = self.tenant_of(digest)
        return holder is not None and holder != tenant and self._demand.is_recent(holder)

    def tenant_of(self, digest: str | None) -> str | None:
        """Returns the tenant that the adapter is charged to, or None if there is none, as for a pinned adapter."""
        if digest is None:
            return None
        charge = self._charges.get(digest)
        return None if charge is None else charge[0]


@dataclass(slots=True)
class _Choice:
    """The choice among adapters of which some must leave for a new one."""

    tenant: str  # The tenant that gets the new adapter.
    size: int  # The new adapter's.
    even: float  # The even share.
    held: Counter[str]
    charges: Mapping[str, tuple[str, int]]
    holders: dict[str, str | None]  # The tenant of each candidate that has not left.
    recent: set[str]  # Tenants with candidates that have wanted adapters recently.

    def losers(self) -> Iterator[str]:
        """Yields the candidates of which each may be the next to leave, in their order."""
        most = max((self.held[holder] for holder in self.recent), default=0)
        takes = any(self._is_taken(digest, holder, most) for digest, holder in self.holders.items())
        for digest, holder in self.holders.items():
            own = holder == self.tenant and not takes
            if holder not in self.recent or own or self._is_taken(digest, holder, most):
                yield digest

    def evict(self, digest: str) -> None:
        """Counts an adapter, which may be a candidate, as gone."""
        self.holders.pop(digest, None)
        if digest in self.charges:
            holder, size = self.charges[digest]
            self.held[holder] -= size
            if holder not in self.holders.values():
                self.recent.discard(holder)

    def _is_taken(self, digest: str, holder: str | None, most: int) -> bool:
        """Returns whether the tenant may take this room of another one. `most` is the most that one holds."""
        if holder is None or holder == self.tenant or holder not in self.recent or self.held[holder] != most:
            return False
        own = self.held[self.tenant] + self.size
        return own == self.size or own <= self.even < most or own <= most - self.charges[digest][1]

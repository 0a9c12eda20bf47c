"""Records which replica holds which adapter in which tier, and looks it up by either of them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from lorafleet.cluster.routing.routing import Tier


class TierTable:
    """Keeps one table by replica and one by adapter, which always agree."""

    def __init__(self) -> None:
        self.num_held = 0  # Adapters of all replicas together.
        self._tiers: dict[str, dict[str, Tier]] = {}  # Replica -> adapter -> tier.
        self._holders: dict[str, dict[str, Tier]] = {}  # Adapter -> replica -> tier.

    @property
    def rows(self) -> list[tuple[str, str, Tier | None]]:
        """Everything that is held, as replica, adapter and tier, which is never None."""
        return [(replica_id, digest, tier) for replica_id, held in self._tiers.items() for digest, tier in held.items()]

    @property
    def digests(self) -> Set[str]:
        """The adapters that some replica holds."""
        return self._holders.keys()

    def held(self, replica_id: str) -> Mapping[str, Tier]:
        return self._tiers.get(replica_id, {})

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return self._holders.get(digest, {})

    def add_replica(self, replica_id: str) -> None:
        self._tiers.setdefault(replica_id, {})

    def drop_replica(self, replica_id: str) -> None:
        assert not self._tiers[replica_id], "the holders would still name it"
        del self._tiers[replica_id]

    def set_tier(self, replica_id: str, digest: str, tier: Tier | None) -> bool:
        """Records the tier of an adapter, or with None that the replica no longer holds it. Returns whether the
        adapter has got its first holder or lost its last one."""
        held, holders = self._tiers[replica_id], self._holders.get(digest)
        self.num_held += (tier is not None) - (digest in held)
        if tier is None:
            del held[digest], self._holders[digest][replica_id]
            if not holders:
                del self._holders[digest]
            return not holders
        held[digest] = tier
        if holders is None:
            self._holders[digest] = {replica_id: tier}
            return True
        holders[replica_id] = tier
        return False

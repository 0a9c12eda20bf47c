"""Tracks which replica holds which adapter in which tier, from the replicas' reports to every router's view.

A replica numbers its reports, most of which contain only changes. If one does not follow the last accepted report, the
answer requests a full report. A full report comes every few seconds anyway (cluster/serve/reporting.py). Routers poll
for changes since their version. A router that is too far behind, or comes from another epoch, receives everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from lorafleet.cluster.directory.former_holders import FormerHolders
from lorafleet.cluster.directory.published_changes import PublishedChanges
from lorafleet.cluster.directory.tier_table import TierTable
from lorafleet.cluster.routing.routing import TYPICAL_BYTES, ReplicaChooser, ReplicaLoad, Tier
from lorafleet.protocol.names import bare_name, tenant_of

MAX_CHANGES = 200_000  # Changes recorded for routers that are behind.
FEW_CHANGES = 1000  # Changes recorded however small the table is.

_Change = tuple[str, str, str]  # Kind and key; the key of a tier is replica and adapter.


class Report(msgspec.Struct, frozen=True):
    """A replica's report of its adapters and its load."""

    replica_id: str
    sequence: int  # Starts at 1 and counts up by one as long as the replica's process lives.
    full: bool
    tiers: dict[str, Tier | None]  # Changed adapters, or all if `full`; None: no longer held.
    load: ReplicaLoad
    tokens: dict[str, int] = {}  # Tokens requested since the last report, by adapter.
    cpu_loras: int = 0  # Number of adapters that fit into host memory.
    unread: list[str] = []  # Adapters that are being read from disk, or wait to be read.


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """The homes of an adapter: the replicas where it should live. It may live anywhere while `homes` is empty."""

    homes: tuple[str, ...] = ()
    num_bytes: int = 0


class Routes(msgspec.Struct, frozen=True):
    """The changes that a router does not know yet, or the whole table. Adapters are digests; a name may stand for
    several, or for none."""

    epoch: str
    version: int
    full: bool  # Whether this is the whole table.
    tiers: list[tuple[str, str, Tier | None]]  # Replica, adapter, tier.
    loads: dict[str, ReplicaLoad | None]  # None: the replica is gone, with all that it held.
    names: dict[str, tuple[str, ...]]  # Adapters that are held or placed somewhere; if empty, route by the name.
    placed: dict[str, Placed]


class NameLookup(Protocol):
    """Looks up names in the catalogue and among what resolvers have found, which is too much to store here."""

    def names_of(self, digest: str) -> Sequence[str]: ...
    def digests_of(self, name: str) -> Sequence[str]: ...


def _typical(_: str) -> int:
    return TYPICAL_BYTES


class Residency:
    """The directory's side of residency. It does not wait: RouteBroadcast wakes the pollers after publish().

    Args:
        names: None if requests name adapters by their digests.
        num_bytes: returns the bytes of an adapter.
    """

    def __init__(self, epoch: str, names: NameLookup | None = None, num_bytes: Callable[[str], int] = _typical) -> None:
        self.epoch = epoch
        self.num_reports = 0
        self.changes = PublishedChanges[_Change]()
        self.loads: dict[str, ReplicaLoad] = {}
        self.cpu_loras: dict[str, int] = {}
        self.former = FormerHolders()
        self._tokens: dict[str, int] = {}  # Tokens requested since the last take_tokens(), by adapter.
        self._tiers = TierTable()
        self._sequence: dict[str, int] = {}
        self._names = names
        self._num_bytes = num_bytes
        self._placed: dict[str, Placed] = {}
        self._deltas: dict[int, Routes] = {}  # Results of since(), by version, until the next publish().

    def begin(self, epoch: str) -> None:
        """Begins an epoch in which all names are known, so that routers receive everything again."""
        self.epoch = epoch
        self._record("name", "")

    # -- replicas -------------------------------------------------------------------------------------------------

    def accept(self, report: Report) -> bool:
        """Applies a report and returns True. Returns False if reports before it are missing, so that the next one must
        be full. A repeated or late report changes nothing."""
        replica_id, last = report.replica_id, self._sequence.get(report.replica_id, 0)
        if report.sequence <= last:
            return True
        if not report.full and (report.sequence != last + 1 or replica_id not in self.loads):
            return False
        self._sequence[replica_id] = report.sequence
        self.num_reports += 1
        self.cpu_loras[replica_id] = report.cpu_loras
        for digest, tokens in report.tokens.items():
            self._tokens[digest] = self._tokens.get(digest, 0) + tokens
        reading_bytes = sum(map(self._num_bytes, report.unread))
        load = msgspec.structs.replace(report.load, reading_bytes=reading_bytes, cpu_loras=report.cpu_loras)
        if self.loads.get(replica_id) != load:
            self.loads[replica_id] = load
            self._record("load", replica_id)
        self._tiers.add_replica(replica_id)
        held = self._tiers.held(replica_id)
        if report.full:
            for digest in [known for known in held if report.tiers.get(known) is None]:
                self._set_tier(replica_id, digest, None)
        for digest, tier in report.tiers.items():
            if held.get(digest) != tier:
                self._set_tier(replica_id, digest, tier)
        return True

    def forget(self, replica_id: str) -> None:
        """Removes a replica that is gone. If it comes back, it starts with a full report."""
        if self.loads.pop(replica_id, None) is None:
            return
        for digest in list(self._tiers.held(replica_id)):
            self._set_tier(replica_id, digest, None)
        self._tiers.drop_replica(replica_id)
        del self._sequence[replica_id], self.cpu_loras[replica_id]
        self._record("load", replica_id)

    def take_tokens(self) -> dict[str, int]:
        """Returns the tokens requested since the last call, by adapter."""
        taken, self._tokens = self._tokens, {}
        return taken

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return self._tiers.holders(digest)

    def held(self, replica_id: str) -> Mapping[str, Tier]:
        return self._tiers.held(replica_id)

    def homes(self, digest: str) -> tuple[str, ...]:
        """Returns the replicas where placement wants the adapter."""
        return self._placed.get(digest, Placed()).homes

    def _set_tier(self, replica_id: str, digest: str, tier: Tier | None) -> None:
        if self._tiers.set_tier(replica_id, digest, tier):
            self._record_names(digest)
        if tier is None:
            self.former.record(digest, replica_id)
        self._record("tier", replica_id, digest)

    # -- the directory itself ---------------------------------------------------------------------------------------

    def name_changed(self, name: str) -> None:
        """Records that the name stands for something else now, or for nothing."""
        self._record("name", name)

    def set_placed(self, digest: str, placed: Placed) -> None:
        if self._placed.get(digest, Placed()) != placed:
            if placed.homes:
                self._placed[digest] = placed
            else:
                del self._placed[digest]
            self._record("placed", digest)
            self._record_names(digest)

    def _matters(self, digest: str) -> bool:
        """Returns whether routers need to know the adapter; they need not know the others, which may be a million."""
        return digest in self._tiers.digests or digest in self._placed

    def _record_names(self, digest: str) -> None:
        if self._names is not None:
            for name in self._names.names_of(digest):
                self._record("name", name)

    # -- routers ----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        self.changes.publish(min(MAX_CHANGES, FEW_CHANGES + self._num_publishable))
        self._deltas.clear()

    def since(self, epoch: str, version: int) -> Routes:
        """Returns the published changes since `version`, as they are now. Routers at the same version get the same
        object."""
        if epoch != self.epoch or not self.changes.reaches_back_to(version):
            return self._everything()
        if version not in self._deltas:
            self._deltas[version] = self._delta(version)
        return self._deltas[version]

    def _delta(self, version: int) -> Routes:
        routes = Routes(self.epoch, self.changes.version, False, [], {}, {}, {})
        for kind, key, digest in self.changes.since(version):
            if kind == "tier":
                routes.tiers.append((key, digest, self._tiers.held(key).get(digest)))
            elif kind == "load":
                routes.loads[key] = self.loads.get(key)
            elif kind == "name":
                routes.names[key] = self._digests_of(key)
            else:
                routes.placed[key] = self._placed.get(key, Placed())
        return routes

    def _everything(self) -> Routes:
        digests = self._tiers.digests | self._placed.keys()
        names: dict[str, tuple[str, ...]] = {}
        if self._names is not None:
            names = {name: self._digests_of(name) for digest in digests for name in self._names.names_of(digest)}
        tiers, placed = self._tiers.rows, dict(self._placed)
        return Routes(self.epoch, self.changes.version, True, tiers, dict(self.loads), names, placed)

    @property
    def _num_publishable(self) -> int:
        """About the number of items in _everything(), if each adapter has one name. More changes are not worth
        recording: most would concern adapters that are gone, and sending everything would be shorter."""
        return self._tiers.num_held + len(self.loads) + len(self._tiers.digests) + 2 * len(self._placed)

    def _digests_of(self, name: str) -> tuple[str, ...]:
        digests = self._names.digests_of(name) if self._names is not None else ()
        return tuple(digest for digest in digests if self._matters(digest))

    def _record(self, kind: str, key: str, digest: str = "") -> None:
        self.changes.record((kind, key, digest), is_urgent=kind != "load" or key not in self.loads)


class RouteView:
    """A router's side of residency. It updates a ReplicaChooser, and knows which adapters a name stands for.

    A restarted directory knows nothing at first. So what a replica held before still counts until that directory has
    received a report of the replica. The same applies to the names of held adapters, which replicas bring when they
    join.
    """

    def __init__(self, chooser: ReplicaChooser) -> None:
        self.chooser = chooser
        self.epoch, self.version = "", -1
        self._names: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, set[str]] = {}  # Adapters, by replica.
        self._carried: set[str] = set()  # Replicas whose tiers are from an earlier epoch.
        self._owned: dict[str, str] = {}  # Bare name -> the full name of a tenant's adapter that was published last.

    def apply(self, routes: Routes) -> None:
        """Applies an answer of the directory. The order matters: what is gone goes before what has come."""
        if routes.full:
            self._begin_table(routes)
        for replica_id in self._carried & routes.loads.keys():
            self._carried.discard(replica_id)
            self._drop_held(replica_id)
        for replica_id, digest, tier in routes.tiers:
            self._apply_tier(replica_id, digest, tier)
        for replica_id, load in routes.loads.items():
            self._apply_load(replica_id, load)
        for name, digests in routes.names.items():
            self._apply_name(name, digests)
        if routes.full:
            self._drop_unknown_names(routes)
        for digest, placed in routes.placed.items():
            self.chooser.set_homes(digest, placed.homes, placed.num_bytes)
        self.epoch, self.version = routes.epoch, routes.version

    def _begin_table(self, routes: Routes) -> None:
        """Drops what a whole table replaces, but not what is carried over from an earlier epoch."""
        if routes.epoch != self.epoch:
            self._carried = self.chooser.holding
        self.chooser.clear_homes()
        for replica_id in self._held.keys() - self._carried:
            self._drop_held(replica_id)
            if replica_id not in routes.loads:
                self.chooser.forget(replica_id)

    def _apply_tier(self, replica_id: str, digest: str, tier: Tier | None) -> None:
        self.chooser.set_tier(replica_id, digest, tier)
        held = self._held.setdefault(replica_id, set())
        if tier is None:
            held.discard(digest)
        else:
            held.add(digest)

    def _apply_load(self, replica_id: str, load: ReplicaLoad | None) -> None:
        if load is None:
            self.chooser.forget(replica_id)
        else:
            self.chooser.set_load(replica_id, load)

    def _apply_name(self, name: str, digests: tuple[str, ...]) -> None:
        if digests:
            self._names[name] = digests
            if tenant_of(name) is not None:
                self._owned[bare_name(name)] = name
        elif not (self._carried and self._is_held(name)):  # Otherwise its holder may not have reported yet.
            self._names.pop(name, None)

    def _drop_unknown_names(self, routes: Routes) -> None:
        """Drops the names that a whole table lacks, unless their adapters are still held."""
        self._names = {
            name: digests for name, digests in self._names.items() if name in routes.names or self._is_held(name)
        }
        self._owned = {bare: name for bare, name in self._owned.items() if name in self._names}

    def _drop_held(self, replica_id: str) -> None:
        for digest in self._held.pop(replica_id, ()):
            self.chooser.set_tier(replica_id, digest, None)

    def _is_held(self, name: str) -> bool:
        return any(map(self.chooser.is_held, self._names.get(name, ())))

    def adapter(self, name: str) -> str:
        """Returns the digest to route by. For several versions behind one name it is the first, since they share their
        homes' queue. A router does not know a request's tenant, so a bare name that nobody owns is taken for the
        tenant's adapter of this name."""
        known = self._names.get(name) or self._names.get(self._owned.get(name, ""), (name,))
        return known[0]

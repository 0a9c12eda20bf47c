"""Tracks which replica holds which adapter in which tier, from the replicas' reports to every router's view.

A replica numbers its reports, most of which contain only changes. If one does not follow the last accepted report, the
answer requests a full report. A full report comes every few seconds anyway (cluster/serve/reporting.py). Routers poll
for changes since their version. A router that is too far behind, or comes from another epoch, receives everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from lorafleet.cluster.directory.recent_changes import RecentChanges
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


class Names(Protocol):
    """Looks up names in the catalogue and among what resolvers have found, which is too much to store here."""

    def names(self, adapter: str) -> Sequence[str]: ...
    def adapters(self, name: str) -> Sequence[str]: ...


def _typical(_: str) -> int:
    return TYPICAL_BYTES


class Residency:
    """The directory's side of residency. It does not wait: the directory wakes the pollers when `told` has moved.

    Args:
        names: None if requests name adapters by their digests.
        num_bytes: returns the bytes of an adapter.
    """

    def __init__(self, epoch: str, names: Names | None = None, num_bytes: Callable[[str], int] = _typical) -> None:
        self.epoch = epoch
        self.num_reports = 0
        self.told = 0  # The version that is published to routers; later changes wait for tell().
        self.loads: dict[str, ReplicaLoad] = {}
        self.cpu_loras: dict[str, int] = {}
        self._tokens: dict[str, int] = {}  # Tokens requested since the last take_tokens(), by adapter.
        self._tiers: dict[str, dict[str, Tier]] = {}  # Replica -> adapter -> tier.
        self._holders: dict[str, dict[str, Tier]] = {}  # Adapter -> replica -> tier.
        self._sequence: dict[str, int] = {}
        self._names = names
        self._num_bytes = num_bytes
        self._placed: dict[str, Placed] = {}
        self._version = 0
        self._moved_at = 0  # The last version that changed more than a replica's load.
        self._untold: dict[_Change, None] = {}
        self._num_held = 0  # Adapters in _tiers, of all replicas together.
        self._changes = RecentChanges[_Change]()  # By the version that published them last.
        self._deltas: dict[int, Routes] = {}  # Changes up to `told`, by the router's version.

    def begin(self, epoch: str) -> None:
        """Begins an epoch in which all names are known, so that routers receive everything again."""
        self.epoch = epoch
        self._note("name", "")

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
        for adapter, tokens in report.tokens.items():
            self._tokens[adapter] = self._tokens.get(adapter, 0) + tokens
        reading_bytes = sum(map(self._num_bytes, report.unread))
        load = msgspec.structs.replace(report.load, reading_bytes=reading_bytes)
        if self.loads.get(replica_id) != load:
            self.loads[replica_id] = load
            self._note("load", replica_id)
        held = self._tiers.setdefault(replica_id, {})
        if report.full:
            for adapter in [one for one in held if report.tiers.get(one) is None]:
                self._set_tier(replica_id, held, adapter, None)
        for adapter, tier in report.tiers.items():
            self._set_tier(replica_id, held, adapter, tier)
        return True

    def forget(self, replica_id: str) -> None:
        """Removes a replica that is gone. If it comes back, it starts with a full report."""
        if self.loads.pop(replica_id, None) is None:
            return
        held = self._tiers[replica_id]
        for adapter in list(held):
            self._set_tier(replica_id, held, adapter, None)
        del self._sequence[replica_id], self.cpu_loras[replica_id], self._tiers[replica_id]
        self._note("load", replica_id)

    def take_tokens(self) -> dict[str, int]:
        """Returns the tokens requested since the last call, by adapter."""
        taken, self._tokens = self._tokens, {}
        return taken

    def holders(self, adapter: str) -> Mapping[str, Tier]:
        return self._holders.get(adapter, {})

    def held(self, replica_id: str) -> Mapping[str, Tier]:
        return self._tiers.get(replica_id, {})

    def homes(self, adapter: str) -> tuple[str, ...]:
        """Returns the replicas where placement wants the adapter."""
        return self._placed.get(adapter, Placed()).homes

    def _set_tier(self, replica_id: str, held: dict[str, Tier], adapter: str, tier: Tier | None) -> None:
        if held.get(adapter) == tier:
            return
        self._num_held += (tier is not None) - (adapter in held)
        if tier is None:
            del held[adapter]
            self._drop_holder(adapter, replica_id)
        else:
            held[adapter] = tier
            if adapter not in self._holders:
                self._holders[adapter] = {}
                self._note_names(adapter)
            self._holders[adapter][replica_id] = tier
        self._note("tier", replica_id, adapter)

    def _drop_holder(self, adapter: str, replica_id: str) -> None:
        holders = self._holders[adapter]
        del holders[replica_id]
        if not holders:
            del self._holders[adapter]
            self._note_names(adapter)

    # -- the directory itself ---------------------------------------------------------------------------------------

    def name_changed(self, name: str) -> None:
        """Records that the name stands for something else now, or for nothing."""
        self._note("name", name)

    def set_placed(self, adapter: str, placed: Placed) -> None:
        if self._placed.get(adapter, Placed()) != placed:
            if placed.homes:
                self._placed[adapter] = placed
            else:
                del self._placed[adapter]
            self._note("placed", adapter)
            self._note_names(adapter)

    def _matters(self, adapter: str) -> bool:
        """Returns whether routers need to know the adapter; they need not know the others, which may be a million."""
        return adapter in self._holders or adapter in self._placed

    def _note_names(self, adapter: str) -> None:
        if self._names is not None:
            for name in self._names.names(adapter):
                self._note("name", name)

    # -- routers ----------------------------------------------------------------------------------------------------

    @property
    def untold(self) -> bool:
        return self.told < self._version

    @property
    def moved(self) -> bool:
        """Whether there is an unpublished change that cannot wait."""
        return self.told < self._moved_at

    def tell(self) -> None:
        self.told = self._version
        for change in self._untold:
            self._changes.note(change, self.told)
        self._untold = {}
        self._changes.shrink(min(MAX_CHANGES, FEW_CHANGES + self._num_tellable))
        self._deltas.clear()

    def since(self, epoch: str, version: int) -> Routes:
        """Returns the changes since `version` up to `told`, as they are now. Routers at the same version get the same
        object."""
        if epoch != self.epoch or not self._changes.forgotten <= version <= self.told:
            return self._everything()
        if version not in self._deltas:
            self._deltas[version] = self._delta(version)
        return self._deltas[version]

    def _delta(self, version: int) -> Routes:
        routes = Routes(self.epoch, self.told, False, [], {}, {}, {})
        for kind, key, adapter in self._changes.since(version):
            if kind == "tier":
                routes.tiers.append((key, adapter, self._tiers.get(key, {}).get(adapter)))
            elif kind == "load":
                routes.loads[key] = self.loads.get(key)
            elif kind == "name":
                routes.names[key] = self._told_of(key)
            else:
                routes.placed[key] = self._placed.get(key, Placed())
        return routes

    def _everything(self) -> Routes:
        tiers: list[tuple[str, str, Tier | None]] = []
        for replica_id, held in self._tiers.items():
            tiers += [(replica_id, adapter, tier) for adapter, tier in held.items()]
        adapters = self._holders.keys() | self._placed.keys()
        names: dict[str, tuple[str, ...]] = {}
        if self._names is not None:
            names = {name: self._told_of(name) for adapter in adapters for name in self._names.names(adapter)}
        return Routes(self.epoch, self.told, True, tiers, dict(self.loads), names, dict(self._placed))

    @property
    def _num_tellable(self) -> int:
        """About the number of items in _everything(), if each adapter has one name. More changes are not worth
        recording: most would concern adapters that are gone, and sending everything would be shorter."""
        return self._num_held + len(self.loads) + len(self._holders) + 2 * len(self._placed)

    def _told_of(self, name: str) -> tuple[str, ...]:
        adapters = self._names.adapters(name) if self._names is not None else ()
        return tuple(adapter for adapter in adapters if self._matters(adapter))

    def _note(self, kind: str, key: str, adapter: str = "") -> None:
        self._version += 1
        if kind != "load" or key not in self.loads:
            self._moved_at = self._version
        self._untold[kind, key, adapter] = None


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
        chooser = self.chooser
        if routes.full:
            if routes.epoch != self.epoch:
                self._carried = chooser.holding
            chooser.clear_homes()
            for replica_id in self._held.keys() - self._carried:
                self._drop_held(replica_id)
                if replica_id not in routes.loads:
                    chooser.forget(replica_id)
        for replica_id in self._carried & routes.loads.keys():
            self._carried.discard(replica_id)
            self._drop_held(replica_id)
        for replica_id, adapter, tier in routes.tiers:
            chooser.set_tier(replica_id, adapter, tier)
            held = self._held.setdefault(replica_id, set())
            if tier is None:
                held.discard(adapter)
            else:
                held.add(adapter)
        for replica_id, load in routes.loads.items():
            if load is None:
                chooser.forget(replica_id)
            else:
                chooser.set_load(replica_id, load)
        for name, adapters in routes.names.items():
            if adapters:
                self._names[name] = adapters
                if tenant_of(name) is not None:
                    self._owned[bare_name(name)] = name
            elif not (self._carried and self._is_held(name)):  # Otherwise its holder may not have reported yet.
                self._names.pop(name, None)
        if routes.full:
            self._names = {
                name: adapters for name, adapters in self._names.items() if name in routes.names or self._is_held(name)
            }
            self._owned = {bare: name for bare, name in self._owned.items() if name in self._names}
        for adapter, placed in routes.placed.items():
            chooser.set_homes(adapter, placed.homes, placed.num_bytes)
        self.epoch, self.version = routes.epoch, routes.version

    def _drop_held(self, replica_id: str) -> None:
        for adapter in self._held.pop(replica_id, ()):
            self.chooser.set_tier(replica_id, adapter, None)

    def _is_held(self, name: str) -> bool:
        return any(map(self.chooser.is_held, self._names.get(name, ())))

    def adapter(self, name: str) -> str:
        """Returns the digest to route by. For several versions behind one name it is the first, since they share their
        homes' queue. A router does not know a request's tenant, so a bare name that nobody owns is taken for the
        tenant's adapter of this name."""
        known = self._names.get(name) or self._names.get(self._owned.get(name, ""), (name,))
        return known[0]

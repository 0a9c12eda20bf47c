"""The adapter directory: which names exist, with which digest, and which replica holds which of them.

Plain asyncio, in memory, without Ray (cluster/directory_actor.py wraps it into an actor). Every replica keeps a copy of
the catalogue and polls `watch`; a write returns once every live replica has the new version, or can no longer use its
old copy: see LEASE_S.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from lorafleet.workers.errors import AdapterExists, ModelNotFound
from lorafleet.workers.lora.request import LoRARequest

# A replica may answer from its copy for LEASE_S after it *sent* the last watch call that was answered. A watch call is
# held for HOLD_S at most, so the lease of a healthy replica never runs out. A write that waited ACKNOWLEDGE_S for a
# silent replica may return: that replica's lease is over, so it asks the directory before it answers.
HOLD_S = 1.0
LEASE_S = 4.0
ACKNOWLEDGE_S = 5.0
FORGET_S = 60.0  # a replica that was silent for this long is gone without having said so


class Catalogue(msgspec.Struct, frozen=True):
    """One version of what exists. `removed`: unloaded names, which a restarting replica must not bring back."""

    epoch: str  # of the directory process that made it
    version: int
    entries: dict[str, LoRARequest]
    removed: frozenset[str] = frozenset()


class Load(msgspec.Struct, frozen=True):
    """What one replica holds and how busy it is; digests, in the order of use."""

    gpu: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    num_requests: int = 0  # running and waiting


class RouteTable(msgspec.Struct, frozen=True):
    """What routers need: replicas by adapter name, and the requests on each replica."""

    version: int
    gpu: dict[str, tuple[str, ...]]
    cpu: dict[str, tuple[str, ...]]
    num_requests: dict[str, int]


class Progress(msgspec.Struct, frozen=True):
    """A step of a replica's start, for the person who waits for it."""

    replica_id: str
    text: str
    failed: bool = False


class StaleEpoch(Exception):
    """The directory was restarted: join again, then repeat the call."""


class Directory(Protocol):
    """What replicas and routers call; AdapterDirectory itself, or its actor's handle in RemoteDirectory."""

    async def join(self, replica_id: str, known: Catalogue | None) -> Catalogue: ...
    async def leave(self, replica_id: str) -> None: ...
    async def watch(self, replica_id: str, epoch: str, version: int) -> Catalogue: ...
    async def lookup(self, epoch: str, name: str) -> LoRARequest | None: ...
    async def publish(self, epoch: str, entry: LoRARequest, *, replace: bool, wait: bool) -> LoRARequest: ...
    async def seed(self, epoch: str, entry: LoRARequest) -> LoRARequest | None: ...
    async def retract(self, epoch: str, name: str) -> None: ...
    async def report(self, replica_id: str, load: Load) -> None: ...
    async def routes(self, version: int) -> RouteTable: ...
    async def note(self, progress: Progress) -> None: ...


class _Replica:
    def __init__(self, now: float) -> None:
        self.acknowledged = -1
        self.seen = now
        self.load = Load()


class AdapterDirectory:
    """Everything runs on one event loop; between two awaits nothing else happens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._catalogue = Catalogue(uuid.uuid4().hex, 0, {})
        self._replicas: dict[str, _Replica] = {}
        self._routes_version = 0
        self._changed = asyncio.Event()
        self._acknowledgement = asyncio.Event()
        self._routes_changed = asyncio.Event()
        self._progress: list[Progress] = []

    @property
    def idle(self) -> bool:
        """No replica has called for a while: nobody is left who could use this directory."""
        return not self._live()

    async def join(self, replica_id: str, known: Catalogue | None) -> Catalogue:
        """A replica starts, or finds a restarted directory and brings what it knows: the newest copy wins."""
        self._replicas = {name: one for name, one in self._replicas.items() if self._clock() - one.seen < FORGET_S}
        self._replicas[replica_id] = _Replica(self._clock())
        now = self._catalogue
        if known is not None and known.epoch != now.epoch and known.version > now.version:
            self._publish(known.entries, known.removed, known.version)
        return self._catalogue

    async def leave(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None):
            self._wake_writers()
            self._wake_routers()

    async def watch(self, replica_id: str, epoch: str, version: int) -> Catalogue:
        """Acknowledges `version`; returns as soon as there is another one, or after HOLD_S."""
        self._check(epoch)
        replica = self._seen(replica_id)
        replica.acknowledged = max(replica.acknowledged, version)
        self._wake_writers()
        deadline = self._clock() + HOLD_S
        while self._catalogue.version <= version and await self._wait(self._changed, deadline):
            pass
        self._seen(replica_id)
        return self._catalogue

    async def lookup(self, epoch: str, name: str) -> LoRARequest | None:
        self._check(epoch)
        return self._catalogue.entries.get(name)

    async def publish(self, epoch: str, entry: LoRARequest, *, replace: bool, wait: bool) -> LoRARequest:
        """Adds or replaces a name. AdapterExists where the name is taken. wait: until every replica knows of it."""
        self._check(epoch)
        present = self._catalogue.entries.get(entry.lora_name)
        if present is not None and not replace:
            raise AdapterExists(
                f"The lora adapter '{entry.lora_name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                "lora_name",
            )
        self._put(entry)
        if wait:
            await self._acknowledged(self._catalogue.version)
        return entry

    async def seed(self, epoch: str, entry: LoRARequest) -> LoRARequest | None:
        """Adds a name if nobody did; what is there stays, and what was unloaded stays unloaded (None)."""
        self._check(epoch)
        name = entry.lora_name
        if name not in self._catalogue.entries and name not in self._catalogue.removed:
            self._put(entry)
        return self._catalogue.entries.get(name)

    async def retract(self, epoch: str, name: str) -> None:
        """Removes a name, for every replica."""
        self._check(epoch)
        entries = dict(self._catalogue.entries)
        if entries.pop(name, None) is None:
            raise ModelNotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")
        self._publish(entries, self._catalogue.removed | {name}, self._catalogue.version + 1)
        await self._acknowledged(self._catalogue.version)

    async def report(self, replica_id: str, load: Load) -> None:
        self._seen(replica_id).load = load
        self._wake_routers()

    async def routes(self, version: int) -> RouteTable:
        """Returns as soon as the table is not `version` any more, or after HOLD_S."""
        deadline = self._clock() + HOLD_S
        while self._routes_version == version and await self._wait(self._routes_changed, deadline):
            pass
        return self._route_table()

    async def note(self, progress: Progress) -> None:
        self._progress.append(progress)

    async def progress(self, after: int) -> list[Progress]:
        return self._progress[after:]

    def _check(self, epoch: str) -> None:
        if epoch != self._catalogue.epoch:
            raise StaleEpoch(epoch)

    def _seen(self, replica_id: str) -> _Replica:
        replica = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        replica.seen = self._clock()
        return replica

    def _live(self) -> list[_Replica]:
        return [r for r in self._replicas.values() if self._clock() - r.seen < ACKNOWLEDGE_S + HOLD_S]

    def _put(self, entry: LoRARequest) -> None:
        entries = self._catalogue.entries | {entry.lora_name: entry}
        self._publish(entries, self._catalogue.removed - {entry.lora_name}, self._catalogue.version + 1)

    def _publish(self, entries: dict[str, LoRARequest], removed: frozenset[str], version: int) -> None:
        self._catalogue = Catalogue(self._catalogue.epoch, version, entries, removed)
        self._wake_replicas()
        self._wake_routers()

    async def _acknowledged(self, version: int) -> None:
        deadline = self._clock() + ACKNOWLEDGE_S
        while any(replica.acknowledged < version for replica in self._live()):
            if not await self._wait(self._acknowledgement, deadline):
                return

    def _wake_replicas(self) -> None:
        self._changed, moved = asyncio.Event(), self._changed
        moved.set()

    def _wake_writers(self) -> None:
        self._acknowledgement, moved = asyncio.Event(), self._acknowledgement
        moved.set()

    def _wake_routers(self) -> None:
        self._routes_version += 1
        self._routes_changed, moved = asyncio.Event(), self._routes_changed
        moved.set()

    async def _wait(self, event: asyncio.Event, deadline: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), deadline - self._clock())
        except TimeoutError:
            return False
        return True

    def _route_table(self) -> RouteTable:
        names_of: dict[str, list[str]] = {}
        for entry in self._catalogue.entries.values():
            names_of.setdefault(entry.digest, []).append(entry.lora_name)
        gpu: dict[str, tuple[str, ...]] = {}
        cpu: dict[str, tuple[str, ...]] = {}
        for replica_id, replica in self._replicas.items():
            for table, digests in ((gpu, replica.load.gpu), (cpu, replica.load.cpu)):
                for name in (name for digest in digests for name in names_of.get(digest, ())):
                    table[name] = (*table.get(name, ()), replica_id)
        requests = {replica_id: replica.load.num_requests for replica_id, replica in self._replicas.items()}
        return RouteTable(self._routes_version, gpu, cpu, requests)

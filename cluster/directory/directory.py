"""The adapter directory, which knows what each public name stands for and which replica holds which adapter.

It is plain asyncio without Ray; cluster/directory/directory_actor.py wraps it into an actor. The catalogue below it is
durable. Names that resolvers found are held in memory only, and the replicas bring them back after a restart. Every
replica copies the names that it was asked for and polls `watch`. A write returns once every live replica has
acknowledged it, or can no longer use its old copies; see LEASE_S. The operations of administrators are in
cluster/admin/administration.py.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from lorafleet.api.telemetry.recent import RecentFailures
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_state import Served
from lorafleet.cluster.catalogue.log_end import LogPosition
from lorafleet.cluster.catalogue.name_index import NameIndex
from lorafleet.cluster.directory.directory_metrics import DirectoryCounts
from lorafleet.cluster.directory.filling import Filler
from lorafleet.cluster.directory.placer import Pins, Placer
from lorafleet.cluster.directory.recent_changes import RecentChanges
from lorafleet.cluster.directory.residency import Report, Residency, Routes
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.routing.routing import TYPICAL_BYTES
from lorafleet.cluster.tenancy.quota_book import Ask, QuotaBook, Verdict
from lorafleet.protocol.errors import LorafleetError, Overloaded, WireError, from_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.names import tenant_of

# A replica may answer from its copies for LEASE_S after it *sent* the last watch call that was answered. A watch call
# is held for at most HOLD_S, so the lease of a healthy replica never expires. A write that has waited ACKNOWLEDGE_S for
# a silent replica may return: the replica's lease has expired, so it asks the directory before it answers.
HOLD_S = 1.0
LEASE_S = 4.0
ACKNOWLEDGE_S = 5.0
FORGET_S = 60.0  # Seconds of silence after which a replica that did not leave counts as gone.
HAND_OVER_S = 10.0  # Seconds that a replica being stopped waits for others to read what only it holds.
# New locations of adapters are published at once, but to all routers together, since one answer serves all routers at
# the same version. Loads are gathered for longer, since each of a thousand replicas may report ten times a second.
MOVES_S = 0.002
LOADS_S = 0.05
GATHER_S = 0.02  # Seconds for which joins are gathered; a thousand replicas may join within a second.
MAX_FOUND = 100_000  # Names found by resolvers; the oldest is dropped, and looked up again when it is requested.
MAX_NAMES_LISTED = 2000  # Names in one answer of `listed`.
MAX_CHANGES = 10_000  # Changed names recorded for replicas that are behind; a replica further behind joins again.

logger = logging.getLogger("lorafleet.cluster")

OrderKind = Literal["load", "pin", "unpin", "drop"]


class Changes(msgspec.Struct, frozen=True):
    """The changes that a replica does not know yet, and its orders."""

    epoch: str  # Epoch of the directory process.
    version: int
    served: dict[str, Served | None]  # Names that stand for something else now; None: for nothing.
    orders: tuple[Order, ...] = ()
    log: LogPosition = LogPosition("", 0)  # Position in the log that `served` reflects.


class Order(msgspec.Struct, frozen=True):
    """An order to one replica, which answers it with `done`."""

    number: int
    # load: read the adapter into host memory. pin: hold it in a slot. unpin: end that. drop: wait for its in-flight
    # requests, then remove it from every tier.
    kind: OrderKind
    lora: LoRARequest


class Found(msgspec.Struct, frozen=True):
    """The answer to a lookup of a name."""

    version: int  # Version of the directory in which the answer holds.
    served: Served | None


class Progress(msgspec.Struct, frozen=True):
    """A step of a replica's start, shown to the person who waits for it."""

    replica_id: str
    text: str
    failed: bool = False


class StaleEpoch(Exception):
    """Raised if the directory was restarted, or no longer knows how far this replica was. The caller joins again, then
    repeats the call."""


class Directory(Protocol):
    """The calls of replicas and routers. AdapterDirectory answers them itself, RemoteDirectory through the actor."""

    async def join(
        self, replica_id: str, epoch: str, names: list[str], found: list[LoRARequest], ready: bool
    ) -> Changes: ...
    async def leave(self, replica_id: str) -> None: ...
    async def drain(self, replica_id: str) -> None: ...
    async def watch(self, replica_id: str, epoch: str, version: int, order: int) -> Changes: ...
    async def done(
        self, replica_id: str, epoch: str, order: int, info: AdapterInfo | None, error: WireError | None
    ) -> None: ...
    async def lookup(self, epoch: str, name: str) -> Found: ...
    async def found(self, epoch: str, lora: LoRARequest) -> Found: ...
    async def listed(self, epoch: str, after: str, end: str, limit: int) -> list[LoRARequest]: ...
    async def report(self, report: Report) -> bool: ...
    async def routes(self, epoch: str, version: int) -> Routes: ...
    async def admit(
        self, replica_id: str, asks: list[Ask], charges: dict[str, int], running: dict[str, int]
    ) -> list[Verdict]: ...
    async def counts(self) -> DirectoryCounts: ...
    async def note(self, progress: Progress) -> None: ...


class _Ordered(NamedTuple):
    order: Order
    answer: asyncio.Future[AdapterInfo | None]
    since_s: float  # Seconds since 1970.


class _Replica:
    def __init__(self, now: float) -> None:
        self.acknowledged = -1
        self.ready = False
        self.seen = now
        self.orders: dict[int, _Ordered] = {}
        self.changed = asyncio.Event()

    @property
    def last_order(self) -> int:
        return max(self.orders, default=0)


class AdapterDirectory:
    """The directory runs on one event loop, so nothing else happens between two awaits.

    It must be callable before load() has ended, since loading the catalogue of a million adapters takes longer than a
    lease. Until then it behaves as follows:
    - It accepts reports, and gives routers the location of adapters.
    - Replicas may use their copies, since nothing can be written.
    - Lookups of names wait.

    After load() it begins a new epoch, for which all replicas join again and compare their copies.
    """

    def __init__(
        self, catalogue: Catalogue, clock: Callable[[], float] = time.monotonic, fill_cpu_loras: bool = False
    ) -> None:
        self.catalogue = catalogue
        self.on_replicas: Callable[[], None] = lambda: None  # Called when a replica has joined or left.
        self.pins: Pins = dict
        self.failures = RecentFailures()
        catalogue.on_change = self._publish
        self._clock = clock
        self._started = clock()
        self._epoch = uuid.uuid4().hex
        self._version = 0
        self._changes = RecentChanges[str]()
        self._since: dict[str, int] = {}  # Version of each served name that changed in this epoch.
        self._found: dict[str, LoRARequest] = {}
        self._found_index = NameIndex()
        self._found_names: dict[str, tuple[str, ...]] = {}  # Names in _found, by digest.
        self._replicas: dict[str, _Replica] = {}
        self._live_before: set[str] = set()
        self._placing_now = asyncio.Lock()
        self._draining: dict[str, tuple[float, asyncio.Task[None]]] = {}  # Start and task of the hand-over.
        self._order_numbers = itertools.count(1)
        self._leases_until = clock()
        self._loaded = False
        self._load_ended = asyncio.Event()
        self._load_error: Exception | None = None
        self._residency = Residency(self._epoch, self, self._num_bytes)
        self._filler = Filler(self._residency, self._all_adapters, self._read_ahead) if fill_cpu_loras else None
        self._placer = Placer(self._residency, self._size, lambda: self.pins(), self._read_ahead, self._filler)
        self._quotas = QuotaBook(self.live, clock)
        self._acknowledgement = asyncio.Event()
        self._routes_changed = asyncio.Event()
        self._told_s = clock()
        self._telling: asyncio.TimerHandle | None = None
        self._looking_at_replicas: asyncio.TimerHandle | None = None
        self._progress: list[Progress] = []

    async def load(self) -> None:
        """Loads the catalogue and begins a new epoch. If this fails, all waiting callers receive the error, and load()
        may be repeated."""
        try:
            await self.catalogue.load()
        except Exception as error:
            self._load_error = error
            self._load_ended.set()
            raise
        self._epoch = uuid.uuid4().hex
        if self.catalogue.state.adapters:
            # Replicas may still use copies from before, even replicas that have not joined this process.
            self._leases_until = self._clock() + ACKNOWLEDGE_S
        self._residency.begin(self._epoch)
        self._loaded, self._load_error = True, None
        self._load_ended.set()
        for replica in self._replicas.values():
            replica.acknowledged = -1
            replica.changed.set()
        self._tell_routers()
        self.on_replicas()

    async def until_loaded(self) -> None:
        await self._load_ended.wait()
        if self._load_error is not None:
            raise self._load_error

    @property
    def idle(self) -> bool:
        """Whether no replica has called for a while, so that nobody is left who could use this directory."""
        return not self.live()

    def live(self) -> list[str]:
        return [name for name, one in self._replicas.items() if self._clock() - one.seen < ACKNOWLEDGE_S + HOLD_S]

    def ready(self) -> list[str]:
        """Returns the live replicas that can be ordered to load or pin an adapter."""
        return [name for name in self.live() if self._replicas[name].ready and name not in self._draining]

    async def wait_for_ready(self, count: int) -> list[str]:
        """Returns the ready replicas. Until ACKNOWLEDGE_S after the start it waits for `count` of them, since the
        replicas of a restarted directory need time to join again."""
        while len(self.ready()) < count and await self._wait(self._acknowledgement, self._started + ACKNOWLEDGE_S):
            pass
        return self.ready()

    def tick(self) -> None:
        """Treats a silent replica as gone, and ends a drain after FORGET_S, since a replica that still lives then was
        not stopped after all. Called every second."""
        for replica_id in [one for one, (since, _) in self._draining.items() if self._clock() - since > FORGET_S]:
            self._end_draining(replica_id)
        live = set(self.ready())
        if live != self._live_before:
            self._live_before = live
            self.on_replicas()
        for replica_id in self._residency.loads.keys() - set(self.live()):
            self._residency.forget(replica_id)
        self._tell_routers()

    async def place(self) -> None:
        """Runs one round of placement. Called about every ROUND_S."""
        if not self._loaded:
            return
        async with self._placing_now:
            began_s = self._clock()
            await in_slices(self._placer.round(began_s))
            self._placer.counts.rounds += 1
            self._placer.counts.round_seconds += self._clock() - began_s
        self._tell_routers()

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def join(
        self, replica_id: str, epoch: str, names: list[str], found: list[LoRARequest], ready: bool
    ) -> Changes:
        """Registers a replica, and returns the present targets of its names.

        The replica has just started (epoch ""), or has found a restarted directory. In that case it brings what
        resolvers found for it, and the first replica to bring a name wins. `ready` says that it may be ordered to load
        adapters.
        """
        if epoch not in ("", self._epoch):
            self._leases_until = max(self._leases_until, self._clock() + ACKNOWLEDGE_S)
        if not self._loaded:
            self._seen(replica_id).ready = ready
            return Changes(self._epoch, self._version, {})
        for name, one in list(self._replicas.items()):
            if self._clock() - one.seen > FORGET_S:
                self._forget(name)
        replica = self._seen(replica_id)
        replica.ready = ready
        for lora in found:
            self._keep_found(lora)
        self._wake_writers()
        self._look_at_replicas()
        orders = tuple(one.order for one in replica.orders.values())
        served = {name: self.served(name) for name in names}
        return Changes(self._epoch, self._version, served, orders, self.catalogue.position)

    async def leave(self, replica_id: str) -> None:
        self._forget(replica_id)

    async def drain(self, replica_id: str) -> None:
        """Hands over the adapters of a replica to which Serve sends no more requests. A router calls this at once, and
        the replica itself when it has answered its requests. Returns when other replicas hold the requested adapters
        that only it held, or HAND_OVER_S after the first call."""
        if replica_id not in self._replicas:
            return
        if replica_id not in self._draining:
            self._placer.leaves(replica_id)
            task = asyncio.get_running_loop().create_task(self._hand_over(replica_id))
            self._draining[replica_id] = self._clock(), task
            self.on_replicas()
        await asyncio.wait([self._draining[replica_id][1]])

    async def watch(self, replica_id: str, epoch: str, version: int, order: int) -> Changes:
        """Acknowledges `version`, and returns as soon as there is a newer version or an order after `order`, or after
        HOLD_S."""
        self._check(epoch)
        replica = self._seen(replica_id)
        replica.acknowledged = max(replica.acknowledged, version)
        self._wake_writers()
        deadline = self._clock() + HOLD_S
        while version >= self._version and order >= replica.last_order and await self._wait(replica.changed, deadline):
            replica.changed.clear()
        self._check(epoch)
        self._seen(replica_id)
        orders = tuple(one.order for one in replica.orders.values() if one.order.number > order)
        return Changes(self._epoch, self._version, self._changed_since(version), orders, self.catalogue.position)

    async def done(
        self, replica_id: str, epoch: str, order: int, info: AdapterInfo | None, error: WireError | None
    ) -> None:
        self._check(epoch)
        ordered = self._seen(replica_id).orders.pop(order, None)
        if ordered is None or ordered.answer.done():
            return
        if error is not None:
            self._note_failure(replica_id, ordered.order, from_wire(error))
            ordered.answer.set_exception(from_wire(error))
        else:
            ordered.answer.set_result(info)

    async def lookup(self, epoch: str, name: str) -> Found:
        await self.until_loaded()
        self._check(epoch)
        return Found(self._version, self.served(name))

    async def found(self, epoch: str, lora: LoRARequest) -> Found:
        """Records an adapter that a resolver has found and a worker has read. The first replica to record a name
        wins."""
        await self.until_loaded()
        self._check(epoch)
        self._keep_found(lora)
        return Found(self._version, self.served(lora.lora_name))

    async def listed(self, epoch: str, after: str, end: str, limit: int) -> list[LoRARequest]:
        """Returns the adapters of the first public names that are greater than `after` and less than `end`, at most
        MAX_NAMES_LISTED. For a split it returns the first version."""
        await self.until_loaded()
        self._check(epoch)
        limit = min(limit, MAX_NAMES_LISTED)
        known = self.catalogue.state.alias_names.between(after, end, limit)
        names = itertools.islice(heapq.merge(known, self._found_index.between(after, end, limit)), limit)
        found: list[LoRARequest] = []
        await in_slices(self._list(names, found))
        return found

    def _list(self, names: Iterator[str], found: list[LoRARequest]) -> Iterator[None]:
        for name in names:
            served = self.served(name)
            if served is not None:
                found.append(served.loras[0])
            yield

    def order(self, replica_id: str, kind: OrderKind, lora: LoRARequest) -> asyncio.Future[AdapterInfo | None]:
        """Sends an order to a replica. The future has the answer that comes with `done`, or Overloaded if the replica
        leaves first."""
        replica = self._replicas[replica_id]
        number = next(self._order_numbers)
        answer: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # Perhaps nobody waits for it.
        replica.orders[number] = _Ordered(Order(number, kind, lora), answer, time.time())
        replica.changed.set()
        return answer

    def forget_found(self, name: str) -> bool:
        """Removes a name that only resolvers know, and returns whether it was there. It is looked up again when it is
        requested."""
        if not self._drop_found(name):
            return False
        self._publish({name})
        return True

    async def acknowledged(self) -> None:
        """Waits until every live replica knows all changes so far, or its lease has expired because it did not poll."""
        version = self._version
        await asyncio.sleep(max(0.0, self._leases_until - self._clock()))
        deadline = self._clock() + ACKNOWLEDGE_S
        while any(self._replicas[name].acknowledged < version for name in self.live()):
            if not await self._wait(self._acknowledgement, deadline):
                return

    # -- routers ------------------------------------------------------------------------------------------------------

    async def report(self, report: Report) -> bool:
        return self.accept(report)

    def accept(self, report: Report) -> bool:
        """Accepts a report; see Residency.accept. A report that was in flight when its replica left is rejected, so
        that it does not register the replica again."""
        if report.replica_id not in self._replicas:
            return False
        self._seen(report.replica_id)
        accepted = self._residency.accept(report)
        self._tell_routers()
        return accepted

    async def routes(self, epoch: str, version: int) -> Routes:
        """Returns routes as soon as there are newer ones than `version` of `epoch`, or after HOLD_S."""
        deadline = self._clock() + HOLD_S
        while (epoch, version) == (self._epoch, self._residency.told):
            if not await self._wait(self._routes_changed, deadline):
                break
        return self._residency.since(epoch, version)

    async def admit(
        self, replica_id: str, asks: list[Ask], charges: dict[str, int], running: dict[str, int]
    ) -> list[Verdict]:
        """Admits or rejects requests against the quotas, which count the requests of all replicas; see
        QuotaBook.admit."""
        return self._quotas.admit(replica_id, asks, charges, running)

    async def counts(self) -> DirectoryCounts:
        placed = self._placer.counts
        return DirectoryCounts(
            adapters=len(self.catalogue.state.adapters),
            replicas=len(self.live()),
            placed_adapters=placed.placed,
            homes=placed.homes,
            placement_rounds=placed.rounds,
            placement_round_seconds=placed.round_seconds,
            rebalances=placed.rebalances,
            placements=placed.placements,
            moves=placed.moves,
            moved_bytes=placed.moved_bytes,
            reads_ahead=placed.reads_ahead + (self._filler.num_told if self._filler is not None else 0),
            reports=self._residency.num_reports,
        )

    async def note(self, progress: Progress) -> None:
        self._progress.append(progress)

    async def progress(self, after: int) -> list[Progress]:
        return self._progress[after:]

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def resolved(self) -> Mapping[str, LoRARequest]:
        """The adapters that resolvers have found, by name."""
        return self._found

    @property
    def resolved_names(self) -> NameIndex:
        return self._found_index

    def is_ready(self, replica_id: str) -> bool:
        return self._replicas[replica_id].ready

    def is_draining(self, replica_id: str) -> bool:
        return replica_id in self._draining

    def owners(self, digest: str) -> list[str]:
        """Returns the names of the adapters that have these bytes."""
        return [*self.catalogue.state.users(digest), *self._found_names.get(digest, ())]

    def open_orders(self) -> Iterator[tuple[str, OrderKind, LoRARequest, float]]:
        """Yields the orders that replicas have not answered, with the time of each in seconds since 1970."""
        for replica_id, replica in self._replicas.items():
            for order, _, since_s in replica.orders.values():
                yield replica_id, order.kind, order.lora, since_s

    # -- inside -------------------------------------------------------------------------------------------------------

    def _note_failure(self, replica_id: str, order: Order, error: LorafleetError) -> None:
        name = order.lora.lora_name
        self.failures.record(error, name, tenant_of(name), replica_id)

    def _look_at_replicas(self) -> None:
        """Schedules one call of on_replicas for all replicas that join within GATHER_S."""
        if self._looking_at_replicas is None:
            self._looking_at_replicas = asyncio.get_running_loop().call_later(GATHER_S, self._replicas_came)

    def _replicas_came(self) -> None:
        self._looking_at_replicas = None
        self.on_replicas()

    def _check(self, epoch: str) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(epoch)

    def _seen(self, replica_id: str) -> _Replica:
        replica = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        replica.seen = self._clock()
        return replica

    def _forget(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for one in replica.orders.values():
            if not one.answer.done():
                one.answer.set_exception(Overloaded(f"replica {replica_id} has left the cluster."))
        self._residency.forget(replica_id)
        self._end_draining(replica_id)
        self._wake_writers()
        self._tell_routers()
        self.on_replicas()

    async def _hand_over(self, replica_id: str) -> None:
        await self.place()
        orders = [self._read_ahead(*one) for one in self._placer.orphans(replica_id)]
        asked = [order for order in orders if order is not None]
        done, left = await asyncio.wait(asked, timeout=HAND_OVER_S) if asked else (set(), set())
        failed = sum(1 for order in done if order.exception() is not None)
        logger.info(
            "replica %s goes: of %d adapters handed over, %d failed and %d are late",
            replica_id,
            len(asked),
            failed,
            len(left),
        )

    def _end_draining(self, replica_id: str) -> None:
        self._draining.pop(replica_id, None)
        self._placer.stays(replica_id)

    def served(self, name: str) -> Served | None:
        since = self._since.get(name, 0)
        served = self.catalogue.state.served(name, since)
        if served is None and name in self._found:
            return Served(name, name, since, (self._found[name],), (1.0,), found=True)
        return served

    def names(self, adapter: str) -> list[str]:
        return [*self.catalogue.state.names(adapter), *self._found_names.get(adapter, ())]

    def adapters(self, name: str) -> tuple[str, ...]:
        served = self.served(name)
        return tuple(lora.digest for lora in served.loras) if served is not None else ()

    def _keep_found(self, lora: LoRARequest) -> None:
        if self.served(lora.lora_name) is None:
            self._found[lora.lora_name] = lora
            self._found_index.add(lora.lora_name)
            self._found_names[lora.digest] = (*self._found_names.get(lora.digest, ()), lora.lora_name)
            self._publish({lora.lora_name})
            if len(self._found) > MAX_FOUND:
                self.forget_found(next(iter(self._found)))

    def _drop_found(self, name: str) -> bool:
        lora = self._found.pop(name, None)
        if lora is None:
            return False
        self._found_index.remove(name)
        others = tuple(one for one in self._found_names.pop(lora.digest) if one != name)
        if others:
            self._found_names[lora.digest] = others
        return True

    def _publish(self, names: Iterable[str]) -> None:
        for name in names:
            self._version += 1
            self._changes.note(name, self._version)
            is_owned = self.catalogue.state.owner_name(name) is not None
            if is_owned:
                self._drop_found(name)
            if is_owned or name in self._found:
                self._since[name] = self._version
            else:
                self._since.pop(name, None)
            self._residency.name_changed(name)
        self._changes.shrink(MAX_CHANGES)
        for replica in self._replicas.values():
            replica.changed.set()
        self._tell_routers()

    def _changed_since(self, version: int) -> dict[str, Served | None]:
        if version < self._changes.forgotten:
            raise StaleEpoch(self._epoch)
        return {name: self.served(name) for name in self._changes.since(version)}

    def _wake_writers(self) -> None:
        self._acknowledgement, moved = asyncio.Event(), self._acknowledgement
        moved.set()

    def _tell_routers(self) -> None:
        """Publishes all changes so far to the routers, as soon as the pause since the last publication is over."""
        if not self._residency.untold:
            return
        wait_s = self._told_s + (MOVES_S if self._residency.moved else LOADS_S) - self._clock()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if wait_s > 0:
            self._telling = asyncio.get_running_loop().call_later(wait_s, self._tell_routers)
            return
        self._told_s = self._clock()
        self._residency.tell()
        self._routes_changed, moved = asyncio.Event(), self._routes_changed
        moved.set()

    async def _wait(self, event: asyncio.Event, deadline: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), deadline - self._clock())
        except TimeoutError:
            return False
        return True

    def _size(self, digest: str) -> tuple[int, int] | None:
        """Returns the bytes and the rank of an adapter in the catalogue, or None."""
        versions = self.catalogue.state.versions(digest)
        return (versions[0].num_bytes, versions[0].rank) if versions else None

    def _num_bytes(self, digest: str) -> int:
        size = self._size(digest)
        return size[0] if size is not None else TYPICAL_BYTES

    def _all_adapters(self) -> Iterator[str]:
        """Yields the digests behind the public names that exist when the iteration begins."""
        for name in [*self.catalogue.state.aliases(), *self._found]:
            yield from self.adapters(name)

    def _read_ahead(self, replica_id: str, digest: str) -> asyncio.Future[AdapterInfo | None] | None:
        """Orders the replica to load the adapter. Returns None if the replica is not ready or no name stands for the
        adapter."""
        if replica_id not in self.ready():
            return None
        for name in self.names(digest):
            served = self.served(name)
            for lora in served.loras if served is not None else ():
                if lora.digest == digest:
                    return self.order(replica_id, "load", lora)
        return None

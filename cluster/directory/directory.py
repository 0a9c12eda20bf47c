"""The adapter directory: what each public name stands for, and which replica holds which adapter.

Plain asyncio without Ray (cluster/directory/directory_actor.py wraps it into an actor). The catalogue below it is
durable; what resolvers found is kept in memory, and brought back by the replicas after a restart. Every replica keeps
copies of the names that it was asked for and polls `watch`; a write returns once every live replica has heard of it, or
can no longer use its old copies: see LEASE_S. What administrators ask for is in cluster/admin/administration.py.
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
# is held for HOLD_S at most, so the lease of a healthy replica never runs out. A write that waited ACKNOWLEDGE_S for a
# silent replica may return: that replica's lease is over, so it asks the directory before it answers.
HOLD_S = 1.0
LEASE_S = 4.0
ACKNOWLEDGE_S = 5.0
FORGET_S = 60.0  # a replica that was silent for this long is gone without having said so
HAND_OVER_S = 10.0  # how long a replica that Serve stops waits for others to read what only it holds
# Routers hear at once of what moved, and together, as one answer serves all that are alike far; how busy replicas are,
# which each of a thousand may say ten times a second, is gathered for longer.
MOVES_S = 0.002
LOADS_S = 0.05
GATHER_S = 0.02  # a thousand replicas may come within a second
MAX_FOUND = 100_000  # Names that resolvers have found; the first of them is looked for again when it is asked for.
MAX_NAMES_LISTED = 2000  # Names in one answer of `listed`.
MAX_CHANGES = 10_000  # names, remembered for replicas that are behind; who is further behind joins again

logger = logging.getLogger("lorafleet.cluster")

OrderKind = Literal["load", "pin", "unpin", "drop"]


class Changes(msgspec.Struct, frozen=True):
    """What a replica did not know: names that stand for something else now (None: for nothing), and its orders."""

    epoch: str  # of the directory process
    version: int
    served: dict[str, Served | None]
    orders: tuple[Order, ...] = ()
    log: LogPosition = LogPosition("", 0)  # of what the names stand for


class Order(msgspec.Struct, frozen=True):
    """What one replica shall do, answered by `done`. load: into host memory. pin: keep in a slot. drop: wait for the
    requests in flight, then forget it in every tier."""

    number: int
    kind: OrderKind
    lora: LoRARequest


class Found(msgspec.Struct, frozen=True):
    """The answer to a lookup, and the version in which it holds."""

    version: int
    served: Served | None


class Progress(msgspec.Struct, frozen=True):
    """A step of a replica's start, for the person who waits for it."""

    replica_id: str
    text: str
    failed: bool = False


class StaleEpoch(Exception):
    """The directory was restarted, or has forgotten how far this replica was: join again, then repeat the call."""


class Directory(Protocol):
    """What replicas and routers call; AdapterDirectory itself, or its actor's handle in RemoteDirectory."""

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
    since_s: float  # seconds since 1970


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
    """Everything runs on one event loop; between two awaits nothing else happens.

    It can be called before load() has ended, and must be: with the catalogue of a million adapters that takes longer
    than a lease. Until then it takes reports, tells routers who holds what, and lets replicas use their copies, since
    nothing can be written; who asks for what a name stands for waits. Then it begins a new epoch, for which all join
    again and compare their copies.
    """

    def __init__(
        self, catalogue: Catalogue, clock: Callable[[], float] = time.monotonic, fill_cpu_loras: bool = False
    ) -> None:
        self.catalogue = catalogue
        self.on_replicas: Callable[[], None] = lambda: None  # told when one has come or gone
        self.pins: Pins = dict
        self.failures = RecentFailures()
        catalogue.on_change = self._publish
        self._clock = clock
        self._started = clock()
        self._epoch = uuid.uuid4().hex
        self._version = 0
        self._changes = RecentChanges[str]()
        self._since: dict[str, int] = {}  # of the served names that changed in this epoch
        self._found: dict[str, LoRARequest] = {}
        self._found_index = NameIndex()
        self._found_names: dict[str, tuple[str, ...]] = {}  # by digest
        self._replicas: dict[str, _Replica] = {}
        self._live_before: set[str] = set()
        self._placing_now = asyncio.Lock()
        self._draining: dict[str, tuple[float, asyncio.Task[None]]] = {}  # since when, and what is handed over
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
        """Where it fails, all who wait for it are told why; to be tried again."""
        try:
            await self.catalogue.load()
        except Exception as error:
            self._load_error = error
            self._load_ended.set()
            raise
        self._epoch = uuid.uuid4().hex
        if self.catalogue.state.adapters:
            # Copies of before may still be in use, by replicas too that this process has not heard of.
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
        """No replica has called for a while: nobody is left who could use this directory."""
        return not self.live()

    def live(self) -> list[str]:
        return [name for name, one in self._replicas.items() if self._clock() - one.seen < ACKNOWLEDGE_S + HOLD_S]

    def ready(self) -> list[str]:
        """Those that can be given something to keep."""
        return [name for name in self.live() if self._replicas[name].ready and name not in self._draining]

    async def wait_for_ready(self, count: int) -> list[str]:
        """Those that are ready; gives a restarted directory's replicas time to come back to it."""
        while len(self.ready()) < count and await self._wait(self._acknowledgement, self._started + ACKNOWLEDGE_S):
            pass
        return self.ready()

    def tick(self) -> None:
        """Called every second: a replica that fell silent counts as gone, and one that still lives long after it was
        said to go as not stopped after all."""
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
        """One round of placement, about every ROUND_S."""
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
        """A replica starts (epoch ""), or finds a restarted directory and brings what resolvers found for it: the
        first to bring a name wins. Answers what its names stand for now. ready: to be ordered to load adapters."""
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
        """Serve sends it no more requests: a router says so at once, the replica itself when it has answered those it
        had. Returns when others hold what is asked for and was only there, or HAND_OVER_S after the first call."""
        if replica_id not in self._replicas:
            return
        if replica_id not in self._draining:
            self._placer.leaves(replica_id)
            task = asyncio.get_running_loop().create_task(self._hand_over(replica_id))
            self._draining[replica_id] = self._clock(), task
            self.on_replicas()
        await asyncio.wait([self._draining[replica_id][1]])

    async def watch(self, replica_id: str, epoch: str, version: int, order: int) -> Changes:
        """Acknowledges `version`; returns as soon as there is another one or an order behind `order`, or after
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
        """A resolver has found it, and a worker has read it; who was first wins."""
        await self.until_loaded()
        self._check(epoch)
        self._keep_found(lora)
        return Found(self._version, self.served(lora.lora_name))

    async def listed(self, epoch: str, after: str, end: str, limit: int) -> list[LoRARequest]:
        """The first public names that are greater than `after` and less than `end`, MAX_NAMES_LISTED at most; of a
        split, its first version."""
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
        """The answer comes with `done`; Overloaded where the replica goes before."""
        replica = self._replicas[replica_id]
        number = next(self._order_numbers)
        answer: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting any more
        replica.orders[number] = _Ordered(Order(number, kind, lora), answer, time.time())
        replica.changed.set()
        return answer

    def forget_found(self, name: str) -> bool:
        """A name that only resolvers know of; it is looked for again when it is asked for."""
        if not self._drop_found(name):
            return False
        self._publish({name})
        return True

    async def acknowledged(self) -> None:
        """Until every live replica knows of all changes so far, or its lease is over because it asked for nothing."""
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
        """Residency.accept. A replica that has left is not taken in again by a report that was under way."""
        if report.replica_id not in self._replicas:
            return False
        self._seen(report.replica_id)
        accepted = self._residency.accept(report)
        self._tell_routers()
        return accepted

    async def routes(self, epoch: str, version: int) -> Routes:
        """Returns as soon as there is something behind `version` of `epoch`, or after HOLD_S."""
        deadline = self._clock() + HOLD_S
        while (epoch, version) == (self._epoch, self._residency.told):
            if not await self._wait(self._routes_changed, deadline):
                break
        return self._residency.since(epoch, version)

    async def admit(
        self, replica_id: str, asks: list[Ask], charges: dict[str, int], running: dict[str, int]
    ) -> list[Verdict]:
        """QuotaBook.admit, of all replicas' requests."""
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

    # -- who looks ----------------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def resolved(self) -> Mapping[str, LoRARequest]:
        """What resolvers have found, by name."""
        return self._found

    @property
    def resolved_names(self) -> NameIndex:
        return self._found_index

    def is_ready(self, replica_id: str) -> bool:
        return self._replicas[replica_id].ready

    def is_draining(self, replica_id: str) -> bool:
        return replica_id in self._draining

    def owners(self, digest: str) -> list[str]:
        """Names of the adapters that have these bytes."""
        return [*self.catalogue.state.users(digest), *self._found_names.get(digest, ())]

    def open_orders(self) -> Iterator[tuple[str, OrderKind, LoRARequest, float]]:
        """What replicas were told and have not answered, and since when."""
        for replica_id, replica in self._replicas.items():
            for order, _, since_s in replica.orders.values():
                yield replica_id, order.kind, order.lora, since_s

    # -- inside -------------------------------------------------------------------------------------------------------

    def _note_failure(self, replica_id: str, order: Order, error: LorafleetError) -> None:
        name = order.lora.lora_name
        self.failures.note(error, name, tenant_of(name), replica_id)

    def _look_at_replicas(self) -> None:
        """Soon, and once for all that join together."""
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
        """Of all that changed so far, as soon as they may be told again."""
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
        """Bytes and rank, of what the catalogue holds."""
        versions = self.catalogue.state.versions(digest)
        return (versions[0].num_bytes, versions[0].rank) if versions else None

    def _num_bytes(self, digest: str) -> int:
        size = self._size(digest)
        return size[0] if size is not None else TYPICAL_BYTES

    def _all_adapters(self) -> Iterator[str]:
        """Digests of what public names stand for when this is begun."""
        for name in [*self.catalogue.state.aliases(), *self._found]:
            yield from self.adapters(name)

    def _read_ahead(self, replica_id: str, digest: str) -> asyncio.Future[AdapterInfo | None] | None:
        """None where it cannot."""
        if replica_id not in self.ready():
            return None
        for name in self.names(digest):
            served = self.served(name)
            for lora in served.loras if served is not None else ():
                if lora.digest == digest:
                    return self.order(replica_id, "load", lora)
        return None

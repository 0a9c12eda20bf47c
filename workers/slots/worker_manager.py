"""Moves adapters through the tiers of one worker: disk -> CPU memory -> slot.

It runs in the engine loop's thread and never blocks it: loader.py reads, checks and packs files in threads, and slots
are filled while steps run. The adapters of waiting requests at the head of the queue are loaded and put into slots in
queue order, before the requests are admitted. They are not evicted for requests behind them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType

from lorafleet.protocol.errors import AdapterChanged, AdapterError, LorafleetError, from_wire
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import AdapterMove, Tier
from lorafleet.protocol.names import tenant_of
from lorafleet.resolvers.fetch_metrics import FetchTotals
from lorafleet.workers.slots.cpu_tier import CPUTier
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager, Slot
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import EmptySlot, FillSlot, ForgetShard, LoadShard, Order

MAX_UNTAKEN = 4096  # recorded moves that nobody takes, as offline
NO_TENANTS: Mapping[str, str] = MappingProxyType({})

log = logging.getLogger(__name__)


# Requests for the same adapter with the same permission to read it share one load.
_LoadKey = tuple[str, str, str | None]


def _key(lora: LoRARequest) -> _LoadKey:
    return lora.digest, lora.lora_path, lora.within


def _owner(lora: LoRARequest) -> str:
    """Returns the tenant that owns the adapter; "" for a public one."""
    return tenant_of(lora.lora_name) or ""


@dataclass(slots=True)
class LoadCounts:
    loads: int = 0
    failures: int = 0
    seconds: float = 0.0
    cpu_evictions: int = 0


@dataclass(slots=True)
class _Copy:
    """A copy into a slot that is in progress."""

    name: str
    slot: Slot
    generation: int
    started_s: float


@dataclass(frozen=True, slots=True)
class _Drop:
    """A requested drop, until no sequence holds the adapter."""

    source: Tier  # nearest tier that has the adapter
    started_s: float


@dataclass(slots=True)
class _Load:
    """The load of one adapter on all ranks."""

    name: str
    tenant: str  # Tenant that brings the adapter in.
    tier: Tier
    future: Future[PackedAdapter]
    started_s: float
    awaited: set[int] = field(default_factory=set)  # Other ranks that have not answered.
    error: LorafleetError | None = None  # First error of another rank.
    digests: set[str] = field(default_factory=set)  # Digests that the other ranks have read.
    callers: list[Future[AdapterInfo]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.future.done() and not self.awaited

    def outcome(self) -> PackedAdapter | LorafleetError:
        """Returns the adapter if every rank has its part of the same one, otherwise the error. Call it once `done`."""
        error = self.future.exception() or self.error
        if error is not None:
            assert isinstance(error, LorafleetError), error  # the loader raises no others
            return error
        adapter = self.future.result()
        if self.digests - {adapter.info.digest}:
            return AdapterChanged(
                f"adapter {self.name!r} is not the same on all ranks of its replica: the files changed while they "
                "were read. Load it again."
            )
        return adapter


class WorkerLoRAManager:
    """Manages the adapters of one worker.

    Args:
        others: The replica's other ranks, which hold their parts of the same adapters in the same slots. An adapter is
            resident only once all ranks have it.
        wake: Called from a pool thread when a load has ended, to end the engine loop's sleep.
    """

    def __init__(
        self,
        config: LoRAConfig,
        slots: LoRAModelManager,
        loader: AdapterLoader,
        others: OtherRanks | None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.slots = slots
        self.counts = LoadCounts()
        self._moves: deque[AdapterMove] = deque(maxlen=MAX_UNTAKEN)
        self._copies: list[_Copy] = []
        self._wake = wake
        self._loader = loader
        self._others = others
        self._num_loads = 0
        self._by_id: dict[int, _Load] = {}  # loads in progress on other ranks
        self._cpu = CPUTier(config.cpu_loras, slots.demand)
        self._loads: dict[_LoadKey, _Load] = {}
        self._wanted: frozenset[str] = frozenset()
        self._doomed: dict[str, _Drop] = {}  # by digest
        self._pins: dict[str, LoRARequest] = {}  # by digest
        self._kept_out: list[tuple[str, LorafleetError]] = []  # digest and error of adapters that pinned ones keep out

    # -- requested by the front end: load now, whatever the queue needs ----------------------------------------------

    def load(self, lora: LoRARequest) -> Future[AdapterInfo]:
        """Reads and checks the adapter into the CPU tier. The future is resolved in poll(), in the engine loop's
        thread."""
        caller: Future[AdapterInfo] = Future()
        self._doomed.pop(lora.digest, None)
        known = self._resident(lora.digest) if lora.digest else None
        if known is not None:
            caller.set_result(known.info)
        else:
            self._start(lora, _owner(lora)).callers.append(caller)
        return caller

    def drop(self, digest: str) -> None:
        """Removes the adapter from every tier, and from its slot as soon as no sequence holds it."""
        self.unpin(digest)
        source: Tier = "gpu" if self.slots.find(digest) is not None else "cpu" if digest in self._cpu else "disk"
        self._doomed.setdefault(digest, _Drop(source, time.monotonic()))
        self._forget(digest)
        self._sweep()

    def pin(self, lora: LoRARequest) -> Future[AdapterInfo]:
        """Loads the adapter and, once a slot is free, keeps it there until unpin(). The future is resolved as in
        load().

        Raises AdapterError if no slot would be left for other adapters.
        """
        others = [digest for digest in self._pins if digest != lora.digest]
        if len(others) + 1 >= len(self.slots.slots):
            raise AdapterError(
                f"pinning adapter {lora.lora_name!r} would pin all {len(self.slots.slots)} slots, and no other adapter "
                "could be served. Unpin one, or raise max_loras."
            )
        self._pins[lora.digest] = lora
        loaded = self.load(lora)
        loaded.add_done_callback(lambda done: done.exception() and self._pins.pop(lora.digest, None))
        return loaded

    def unpin(self, digest: str) -> None:
        self._pins.pop(digest, None)
        slot = self.slots.find(digest)
        if slot is not None:
            self.slots.unpin(slot)

    # -- once a step ----------------------------------------------------------------------------------------------

    def poll(self) -> list[tuple[str, LorafleetError]]:
        """Handles the loads that have ended. Returns the failed ones, and adapters that can get no room, as (requested
        digest, error)."""
        failed, self._kept_out = self._kept_out, []
        self._hear_others()
        for key in [key for key, load in self._loads.items() if load.done]:
            load = self._loads.pop(key)
            seconds = time.monotonic() - load.started_s
            self.counts.seconds += seconds
            outcome = load.outcome()
            if isinstance(outcome, PackedAdapter):
                self._note_load(load, outcome.times.fetch_s, seconds)
                self._admit(outcome, load.tenant)
                for caller in load.callers:
                    caller.set_result(outcome.info)
                continue
            for digest in load.digests:  # read by some rank, but not by all
                if digest not in self._cpu:
                    self._tell(ForgetShard(digest))
            self.counts.failures += 1
            self._moves.append(AdapterMove(load.name, load.tier, "cpu", seconds, type(outcome).__name__))
            failed.append((key[0], outcome))
            for caller in load.callers:
                caller.set_exception(outcome)
        self._sweep()
        return failed

    def prefetch(self, wanted: Sequence[LoRARequest], tenants: Mapping[str, str] = NO_TENANTS) -> None:
        """Starts loads and copies for the waiting requests.

        Args:
            wanted: The distinct adapters of the waiting requests, in queue order.
            tenants: By digest, the tenant whose request waits for the adapter. "" stands for all callers without a
                tenant, and may be left out.
        """
        for tenant in {tenants.get(lora.digest, "") for lora in wanted}:
            self.slots.demand.want(tenant)
        first = wanted[: self._cpu.capacity]
        self._wanted = frozenset(lora.digest for lora in first)
        self._place_pins()
        self._fill_slots(wanted, tenants)
        self._note_copies()
        have_all: set[str] = set()  # tenants that get no more places now
        for lora in first:
            tenant = tenants.get(lora.digest, "")
            if tenant in have_all or self._resident(lora.digest) is not None or _key(lora) in self._loads:
                continue
            evictable = sum(1 for digest in self._cpu.losers(tenant) if digest not in self._wanted)
            if len(self._cpu) + len(self._loads) - evictable >= self._cpu.capacity:
                have_all.add(tenant)
            else:
                self._start(lora, tenant)

    def _place_pins(self) -> None:
        for digest, lora in self._pins.items():
            slot = self.slots.find(digest)
            adapter = self._cpu.get(digest)
            if slot is None and adapter is not None:
                free = self.slots.free_slot(keep=list(self._pins), tenant=_owner(lora))
                if free is not None and self._make_room(adapter, free, _owner(lora), keep=list(self._pins)):
                    self._fill(free, lora, adapter, _owner(lora))
                    slot = free
            if slot is not None:
                self.slots.pin(slot)
            elif adapter is None:
                self._start(lora, _owner(lora))

    def _fill_slots(self, wanted: Sequence[LoRARequest], tenants: Mapping[str, str]) -> None:
        """Starts each adapter's copy as soon as a slot and room for its extras are free, even if its request cannot be
        admitted yet. Room that the first adapter waits for is not taken by those behind it."""
        digests, waits_for_room = [lora.digest for lora in wanted], False
        have_all: set[str] = set()  # tenants that get no more slots now
        for i, digest in enumerate(digests):
            adapter, tenant = self._cpu.get(digest), tenants.get(digest, "")
            if (
                tenant in have_all
                or adapter is None
                or self.slots.find(digest) is not None
                or (waits_for_room and adapter.extra)
            ):
                continue
            slot = self.slots.free_slot(digests[i + 1 :], keep=digests[:i], tenant=tenant)
            if slot is None:
                have_all.add(tenant)
            elif self._make_room(adapter, slot, tenant, digests[i + 1 :], digests[:i]):
                self._fill(slot, wanted[i], adapter, tenant)
            else:
                waits_for_room = True
                self._check_pins(wanted[i], adapter)

    def _check_pins(self, lora: LoRARequest, adapter: PackedAdapter) -> None:
        """Rejects an adapter that would wait for memory of pinned adapters, which never leave."""
        pinned = sum(s.extra.num_bytes for s in self.slots.slots if s.pinned and s.extra is not None)
        limit = self.slots.extra_memory.limit
        if pinned + adapter.extra_bytes > limit:
            error = AdapterError(
                f"adapter {lora.lora_name!r} needs {adapter.extra_bytes} bytes on each GPU besides A and B; of the "
                f"{limit} that lora.extra_memory_gib allows, pinned adapters have {pinned}. Unpin one, or raise "
                "lora.extra_memory_gib."
            )
            self._kept_out.append((lora.digest, error))

    def _make_room(
        self, adapter: PackedAdapter, slot: Slot, tenant: str, wanted: Sequence[str] = (), keep: Sequence[str] = ()
    ) -> bool:
        """Evicts what must leave for the adapter's extras. Returns whether the slot can be filled with it now."""
        for victim in self.slots.to_empty(adapter, slot, wanted, keep, tenant) or ():
            self.slots.evict(victim)
            self._tell(EmptySlot(victim.index))
        return self.slots.has_room(adapter, slot)

    def _fill(self, slot: Slot, lora: LoRARequest, adapter: PackedAdapter, tenant: str) -> None:
        started_s = time.monotonic()
        self.slots.activate(adapter, slot, tenant)
        self._copies.append(_Copy(lora.lora_name, slot, slot.generation, started_s))
        self._tell(FillSlot(lora.digest, slot.index, slot.generation))

    def _note_copies(self) -> None:
        """Records the copies that have ended since the last step, with their durations as steps see them."""
        for copy in list(self._copies):
            given_away = copy.slot.generation != copy.generation
            if given_away or copy.slot.is_ready:
                self._copies.remove(copy)
                if not given_away:
                    self._moves.append(AdapterMove(copy.name, "cpu", "gpu", time.monotonic() - copy.started_s))

    def _note_load(self, load: _Load, fetch_s: float, seconds: float) -> None:
        """Records a load's moves. `fetch_s` is the part of `seconds` until its files were on this node."""
        if load.tier == "remote":
            self._moves.append(AdapterMove(load.name, "remote", "disk", fetch_s))
        self._moves.append(AdapterMove(load.name, "disk", "cpu", seconds - fetch_s))

    def take_moves(self) -> list[AdapterMove]:
        """Returns the moves since the last call."""
        taken = list(self._moves)
        self._moves.clear()
        return taken

    def count_request(self, lora: LoRARequest, tenant: str = "") -> Tier:
        """Counts a tenant's new request. Returns the nearest tier that has its adapter, or into which it is being
        copied."""
        self.slots.demand.count(lora.digest)
        self.slots.demand.want(tenant)
        self._cpu.charge(lora.digest, tenant)
        if self.slots.find(lora.digest) is not None:
            return "gpu"
        return "cpu" if lora.digest in self._cpu else self._tier_of_files(lora)

    def _tier_of_files(self, lora: LoRARequest) -> Tier:
        return "disk" if self._loader.is_here(lora) else "remote"

    def slot_for(self, lora: LoRARequest) -> Slot | None:
        """Returns the adapter's slot, filled or being filled by prefetch(), or None if it has none."""
        slot = self.slots.find(lora.digest)
        if slot is not None:
            self._cpu.touch(lora.digest)
        return slot

    @property
    def fetched(self) -> FetchTotals:
        return self._loader.fetched

    def claims(self, digest: str, claimed: set[int], tenant: str = "") -> set[int]:
        """Returns the slots, beyond those claimed for others, that should drain for an adapter without a slot that the
        tenant's request waits for. There are none if the adapter is not in host memory yet."""
        adapter = self._cpu.get(digest)
        return set() if adapter is None else {slot.index for slot in self.slots.to_drain(adapter, claimed, tenant)}

    def info(self, digest: str) -> AdapterInfo | None:
        """Returns the info of an adapter in host memory or a slot, otherwise None."""
        resident = self._resident(digest)
        return None if resident is None else resident.info

    def resident_cpu(self) -> list[str]:
        return self._cpu.digests

    @property
    def cpu_bytes(self) -> int:
        return self._cpu.num_bytes

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def close(self) -> None:
        self._loader.stop()
        self.slots.wait_for_copies()
        self._loader.free()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _resident(self, digest: str) -> PackedAdapter | None:
        slot = self.slots.find(digest)
        return self._cpu.get(digest) or (slot.adapter if slot is not None else None)

    def _start(self, lora: LoRARequest, tenant: str) -> _Load:
        key = _key(lora)
        self.slots.demand.want(tenant)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load(
                lora.lora_name, tenant, self._tier_of_files(lora), self._loader.submit(lora), time.monotonic()
            )
            load.future.add_done_callback(lambda _: self._wake())
            if self._others is not None:
                self._num_loads += 1
                load.awaited = set(self._others.ranks)
                self._by_id[self._num_loads] = load
                self._tell(LoadShard(self._num_loads, lora))
        return load

    def _admit(self, adapter: PackedAdapter, tenant: str) -> None:
        self.counts.loads += 1
        times = adapter.times
        log.info(
            "adapter %s loaded: %.0f MB, read %.0f ms, check %.0f ms, pack %.0f ms",
            adapter.info.digest[:12],
            adapter.block.numel() / 1e6,
            times.read_s * 1e3,
            times.check_s * 1e3,
            times.pack_s * 1e3,
        )
        for victim in self._cpu.add(adapter, self._need, tenant):
            self.counts.cpu_evictions += 1
            self._tell(ForgetShard(victim))

    def _need(self, digest: str) -> int:
        """Returns how badly the adapter's copy in host memory is needed soon. An adapter in a slot needs it as soon as
        it loses the slot."""
        return 2 * (digest in self._wanted or digest in self._pins) + (self.slots.find(digest) is not None)

    def _sweep(self) -> None:
        """Empties the slots of dropped adapters once no sequence holds them."""
        for digest in list(self._doomed):
            slot = self.slots.find(digest)
            self._forget(digest)
            if slot is None:
                if all(asked != digest for asked, *_ in self._loads):  # a load in progress must not bring it back
                    self._note_dropped(digest)
            elif slot.holders == 0:
                self.slots.deactivate(slot)
                self._tell(EmptySlot(slot.index))
                self._note_dropped(digest)

    def _note_dropped(self, digest: str) -> None:
        drop = self._doomed.pop(digest)
        if drop.source != "disk":  # otherwise it was in no tier of this worker
            self._moves.append(AdapterMove("", drop.source, "none", time.monotonic() - drop.started_s))

    def _forget(self, digest: str) -> None:
        """Removes the adapter from host memory on all ranks."""
        if digest in self._cpu:
            self._cpu.remove(digest)
            self._tell(ForgetShard(digest))

    def _tell(self, order: Order) -> None:
        """Sends an order to the other ranks, which execute orders in the order in which they are sent."""
        if self._others is not None:
            self._others.send(order)

    def _hear_others(self) -> None:
        if self._others is None:
            return
        for answer in self._others.loaded():
            load = self._by_id[answer.load_id]
            load.awaited.discard(answer.rank)
            if answer.error is not None:
                load.error = load.error or from_wire(answer.error)
            else:
                load.digests.add(answer.digest)
            if not load.awaited:
                del self._by_id[answer.load_id]

"""Moves adapters through the tiers of one worker: disk -> host memory -> slot.

It runs in the engine loop's thread and never blocks it: loader.py reads, checks and packs files in threads, and slots
are filled while steps run. The adapters of waiting requests at the head of the queue are loaded and put into slots in
queue order, before the requests are admitted. They are not evicted for requests behind them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

from lorafleet.protocol.errors import AdapterError, LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import AdapterMove, Tier
from lorafleet.resolvers.fetch_metrics import FetchTotals
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.slots.adapter_lives import AdapterLives, AdapterState
from lorafleet.workers.slots.adapter_loads import AdapterLoad, AdapterLoads
from lorafleet.workers.slots.cpu_tier import CPUTier, HostCopies, LoadCounts
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.slots.slot_filler import Sharing, SlotFiller, owner
from lorafleet.workers.slots.slot_policy import Slot
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import ForgetShard, Order
from lorafleet.workers.weak_method import weak

MAX_UNTAKEN = 4096  # recorded moves that nobody takes, as offline
NO_TENANTS: Mapping[str, str] = MappingProxyType({})


class WorkerLoRAManager:
    """Manages the adapters of one worker.

    Args:
        others: The replica's other ranks, which hold their parts of the same adapters in the same slots. An adapter is
            resident only once all ranks have it.
        wake: Called from a pool thread when a load has ended, to end the engine loop's sleep.
        sharing: As in SlotFiller, and so is drafts.
        base: Says for which weights of the base the adapters are packed.
    """

    def __init__(
        self,
        config: LoRAConfig,
        model_manager: LoRAModelManager,
        loader: AdapterLoader,
        others: OtherRanks | None,
        wake: Callable[[], None] = lambda: None,
        sharing: Sharing | None = None,
        drafts: DraftSlots | None = None,
        base: BaseIdentity | None = None,
    ) -> None:
        self.model_manager = model_manager
        self.slots = model_manager.policy
        self.counts = LoadCounts()
        self._loader = loader
        self._others = others
        self._loads = AdapterLoads(loader, others, wake, base or BaseIdentity())
        self._cpu = CPUTier(config.cpu_loras, self.slots.demand)
        self._moves: deque[AdapterMove] = deque(maxlen=MAX_UNTAKEN)
        self._lives = AdapterLives(self._moves.append)
        self._host = HostCopies(self._cpu, self._lives, weak(self._send), self.counts)
        self.filler = SlotFiller(model_manager, self._cpu, self._lives, weak(self._send), sharing, drafts)
        self._wanted: frozenset[str] = frozenset()
        self._rejected: list[tuple[str, LorafleetError]] = []  # Digests and errors for the next poll().

    # -- requested by the front end: load now, whatever the queue needs ----------------------------------------------

    def load(self, lora: LoRARequest) -> Future[AdapterInfo]:
        """Reads and checks the adapter into the CPU tier. The future is resolved in poll(), in the engine loop's
        thread."""
        caller: Future[AdapterInfo] = Future()
        resident = self._resident(lora.digest)
        if self._lives.state(lora.digest) is AdapterState.DROPPING:
            self._lives.enter(lora.digest, AdapterState.READING if resident is None else AdapterState.IN_SLOT)
        if resident is not None:
            caller.set_result(resident.info)
        else:
            self._start(lora, owner(lora)).callers.append(caller)
        return caller

    def drop(self, digest: str) -> None:
        """Removes the adapter from every tier, and from its slot as soon as no sequence holds it."""
        self.unpin(digest)
        self.filler.poll_copies()  # a copy that has ended is recorded as such
        if self._lives.state(digest) is AdapterState.GONE and self._loads.is_reading(digest):
            self._lives.enter(digest, AdapterState.READING)  # it was evicted while it is read from a second place
        if self._lives.state(digest) not in (AdapterState.DROPPING, AdapterState.GONE):
            nearest: Tier = "gpu" if self.slots.find(digest) is not None else "cpu" if digest in self._cpu else "disk"
            self._lives.enter(digest, AdapterState.DROPPING, nearest=nearest)
        self._sweep()

    def pin(self, lora: LoRARequest) -> Future[AdapterInfo]:
        """Loads the adapter and, once a slot is free, keeps it there until unpin(). The future is resolved as in
        load().

        Raises AdapterError if no slot would be left for other adapters.
        """
        pins, num_slots = self.filler.pins, len(self.slots.slots)
        if len(pins.keys() | {lora.digest}) >= num_slots:
            raise AdapterError(
                f"pinning adapter {lora.lora_name!r} would pin all {num_slots} slots, so that no other adapter could "
                "be served. Unpin one, or raise max_gpu_loras."
            )
        pins[lora.digest] = lora
        loaded = self.load(lora)
        loaded.add_done_callback(lambda done: done.exception() and pins.pop(lora.digest, None))
        return loaded

    def unpin(self, digest: str) -> None:
        self.filler.pins.pop(digest, None)
        self.slots.unpin(digest)

    def empty_slots(self) -> None:
        """Empties all slots, which no sequence may hold. Adapters in host memory stay there."""
        self.filler.empty_all()

    def forget_packed(self) -> int:
        """Forgets all adapters, which were packed for other weights of the base, so that they are read again when they
        are needed. No sequence may hold a slot. Returns their number."""
        self.empty_slots()
        return self._host.forget_all()

    # -- once a step ----------------------------------------------------------------------------------------------

    def poll(self) -> list[tuple[str, LorafleetError]]:
        """Handles the loads that have ended. Returns the failed ones, and adapters that can get no room, as (requested
        digest, error)."""
        self.filler.begin_step()
        failed, self._rejected = self._rejected, []
        for load in self._loads.take_ended():
            seconds = time.monotonic() - load.started_s
            self.counts.seconds += seconds
            outcome = load.outcome()
            self._moves += load.moves(outcome, seconds)
            if isinstance(outcome, PackedAdapter):
                self._host.admit(outcome, self._need, load.tenant)
                for caller in load.callers:
                    caller.set_result(outcome.info)
            else:
                self._fail(load)
                failed.append((load.lora.digest, outcome))
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
        for lora in self.filler.place_pins():
            self._start(lora, owner(lora))
        self._rejected += self.filler.fill(wanted, tenants)
        self.filler.poll_copies()
        served: set[str] = set()  # tenants that get no more places now
        for lora in first:
            tenant = tenants.get(lora.digest, "")
            if tenant in served or self._resident(lora.digest) is not None or lora in self._loads:
                continue
            evictable = sum(1 for digest in self._cpu.losers(tenant) if digest not in self._wanted)
            if len(self._cpu) + len(self._loads) - evictable >= self._cpu.capacity:
                served.add(tenant)
            else:
                self._start(lora, tenant)

    def take_moves(self) -> list[AdapterMove]:
        """Returns the moves since the last call."""
        taken = list(self._moves)
        self._moves.clear()
        return taken

    # -- for each request ---------------------------------------------------------------------------------------------

    def count_request(self, lora: LoRARequest, tenant: str = "") -> Tier:
        """Counts a tenant's new request. Returns the nearest tier that has its adapter, or into which it is being
        copied."""
        self.slots.demand.count(lora.digest)
        self.slots.demand.want(tenant)
        self.filler.count(lora.digest)
        self._cpu.charge(lora.digest, tenant)
        if self.slots.find(lora.digest) is not None:
            return "gpu"
        return "cpu" if lora.digest in self._cpu else self._loads.tier_of_files(lora)

    def slot_for(self, lora: LoRARequest) -> Slot | None:
        """Returns the adapter's slot, filled or being filled by prefetch(), or None if it has none."""
        slot = self.slots.find(lora.digest)
        if slot is not None:
            self._cpu.touch(lora.digest)
        return slot

    def claims(self, digest: str, claimed: set[int], tenant: str = "") -> set[int]:
        """Returns the slots, beyond those claimed for others, that should drain for an adapter that a request of the
        tenant waits for."""
        return {slot.index for slot in self.filler.to_drain(digest, claimed, tenant)}

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
        return len(self._loads) > 0

    @property
    def fetched(self) -> FetchTotals:
        return self._loader.fetched

    def close(self) -> None:
        self._loader.stop()
        self.filler.close()
        self.model_manager.wait_for_copies()
        self._loader.free()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _resident(self, digest: str) -> PackedAdapter | None:
        slot = self.slots.find(digest)
        return self._cpu.get(digest) or (slot.adapter if slot is not None else None)

    def _start(self, lora: LoRARequest, tenant: str) -> AdapterLoad:
        self.slots.demand.want(tenant)
        if lora.digest and self._lives.state(lora.digest) is AdapterState.GONE:
            self._lives.enter(lora.digest, AdapterState.READING)
        return self._loads.start(lora, tenant)

    def _fail(self, load: AdapterLoad) -> None:
        self.counts.failures += 1
        for digest in load.digests:  # read by some rank, but not by all
            if digest not in self._cpu:
                self._send(ForgetShard(digest))
        digest = load.lora.digest
        if self._lives.state(digest) is AdapterState.READING and not self._loads.is_reading(digest):
            self._lives.enter(digest, AdapterState.GONE)

    def _need(self, digest: str) -> int:
        """Returns how badly the adapter's copy in host memory is needed soon. An adapter in a slot needs it as soon as
        it loses the slot."""
        is_wanted = digest in self._wanted or digest in self.filler.pins
        return 2 * is_wanted + (self.slots.find(digest) is not None)

    def _sweep(self) -> None:
        """Removes dropped adapters from host memory on all ranks, and from their slots once no sequence holds them."""
        for digest in self._lives.in_state(AdapterState.DROPPING):
            if digest in self._cpu:
                self._cpu.remove(digest)
                self._send(ForgetShard(digest))
            slot = self.slots.find(digest)
            if slot is None and self._loads.is_reading(digest):
                continue  # the load in progress must not bring it back
            if slot is None or slot.holders == 0:
                if slot is not None:
                    self.filler.empty(slot)
                self._lives.enter(digest, AdapterState.GONE)

    def _send(self, order: Order) -> None:
        """Sends an order to the other ranks, which execute orders in the order in which they are sent."""
        if self._others is not None:
            self._others.send(order)

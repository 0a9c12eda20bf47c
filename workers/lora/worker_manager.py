"""An adapter's way through the tiers of one worker: disk -> CPU memory -> slot. Runs in the engine loop's thread and
never blocks it: files are read, checked and packed by a thread pool, slots are filled beside the running steps.

The CPU tier is least-recently-used, of max_cpu_loras adapters. What the waiting requests at the head of the queue
need is not evicted, and is loaded in their order.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lorafleet.workers.errors import AdapterError, AdapterMalformed, LorafleetError
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.lora.model import LoRAModel
from lorafleet.workers.lora.model_manager import LoRAModelManager, Slot
from lorafleet.workers.lora.packed_adapter import PackedAdapter, pack
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest
from lorafleet.workers.models.decoder import DecoderModel

log = logging.getLogger(__name__)

LOAD_THREADS = 4


@dataclass(slots=True)
class LoadCounts:
    loads: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Load:
    future: Future[PackedAdapter]
    started_s: float
    callers: list[Future[AdapterInfo]] = field(default_factory=list)


class WorkerLoRAManager:
    """wake: called from a pool thread when a load has ended, to end the engine loop's sleep."""

    def __init__(
        self,
        model: DecoderModel,
        config: LoRAConfig,
        dtype: torch.dtype,
        device: torch.device,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.slots = LoRAModelManager(model, config, dtype, device)
        self.counts = LoadCounts()
        self._shapes = model.config.linear_shapes()
        self._dtype = dtype
        self._pin = device.type == "cuda"
        self._wake = wake
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="lora-load")
        self._cpu: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._loads: dict[tuple[str, str], _Load] = {}
        self._wanted: frozenset[str] = frozenset()
        self._doomed: set[str] = set()

    # -- asked for by the front: load now, whatever the queue needs -----------------------------------------------

    def load(self, lora: LoRARequest) -> Future[AdapterInfo]:
        """Reads and checks the adapter into the CPU tier. The future ends in poll(), in the engine loop's thread."""
        caller: Future[AdapterInfo] = Future()
        self._doomed.discard(lora.digest)
        known = self._resident(lora.digest) if lora.digest else None
        if known is not None:
            caller.set_result(known.info)
        else:
            self._start(lora).callers.append(caller)
        return caller

    def drop(self, digest: str) -> None:
        """Forgets the adapter in every tier, its slot as soon as no sequence holds it."""
        self._cpu.pop(digest, None)
        self._doomed.add(digest)
        self._sweep()

    def pin(self, digest: str) -> None:
        """Keeps a resident adapter in its slot. Raises AdapterError where it is in none."""
        slot = self.slots.find(digest)
        if slot is None:
            raise AdapterError(f"adapter {digest[:12]} is in no slot, so it cannot be pinned; use it once first.")
        if all(s.pinned or s is slot for s in self.slots.slots):
            raise AdapterError(
                f"pinning adapter {digest[:12]} would pin all {len(self.slots.slots)} slots, and no other adapter "
                "could be served. Unpin one, or raise max_loras."
            )
        slot.pinned = True

    def unpin(self, digest: str) -> None:
        slot = self.slots.find(digest)
        if slot is not None:
            slot.pinned = False

    # -- once a step ----------------------------------------------------------------------------------------------

    def poll(self) -> list[tuple[str, LorafleetError]]:
        """Takes in the loads that have ended; returns the failed ones as (digest asked for, why)."""
        failed: list[tuple[str, LorafleetError]] = []
        for key in [key for key, load in self._loads.items() if load.future.done()]:
            load = self._loads.pop(key)
            self.counts.seconds += time.monotonic() - load.started_s
            error = load.future.exception()
            if error is None:
                self._admit(load.future.result())
                for caller in load.callers:
                    caller.set_result(load.future.result().info)
                continue
            known = error if isinstance(error, LorafleetError) else AdapterMalformed(f"loading failed: {error!r}")
            self.counts.failures += 1
            failed.append((key[0], known))
            for caller in load.callers:
                caller.set_exception(known)
        self._sweep()
        return failed

    def prefetch(self, wanted: Sequence[LoRARequest]) -> None:
        """wanted: the distinct adapters of the waiting requests, in queue order."""
        first = wanted[: self.cpu_capacity]
        self._wanted = frozenset(lora.digest for lora in first)
        for lora in first:
            if self._resident(lora.digest) is not None or (lora.digest, lora.lora_path) in self._loads:
                continue
            evictable = sum(1 for digest in self._cpu if digest not in self._wanted)
            if len(self._cpu) + len(self._loads) - evictable >= self.cpu_capacity:
                break
            self._start(lora)

    def slot_for(self, lora: LoRARequest) -> Slot | None:
        """The adapter's slot, filled or being filled; None where it is not in CPU memory yet or no slot is free."""
        slot = self.slots.find(lora.digest)
        if slot is not None:
            return slot
        adapter = self._cpu.get(lora.digest)
        slot = self.slots.free_slot() if adapter is not None else None
        if adapter is None or slot is None:
            return None
        self._cpu.move_to_end(lora.digest)
        self.slots.activate(adapter, slot)
        return slot

    def in_cpu(self, digest: str) -> bool:
        return digest in self._cpu

    def resident_cpu(self) -> list[str]:
        return list(self._cpu)

    @property
    def cpu_capacity(self) -> int:
        return self.config.cpu_loras

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _resident(self, digest: str) -> PackedAdapter | None:
        slot = self.slots.find(digest)
        return self._cpu.get(digest) or (slot.adapter if slot is not None else None)

    def _start(self, lora: LoRARequest) -> _Load:
        key = (lora.digest, lora.lora_path)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load(self._pool.submit(self._read, lora), time.monotonic())
            load.future.add_done_callback(lambda _: self._wake())
        return load

    def _read(self, lora: LoRARequest) -> PackedAdapter:
        """In a pool thread."""
        model = LoRAModel.from_local_checkpoint(
            lora.lora_path,
            shapes=self._shapes,
            config=self.config,
            dtype=self._dtype,
            name=lora.lora_name,
            expected_digest=lora.digest,
        )
        return pack(model, self.slots.packed_names, self._dtype, self._pin)

    def _admit(self, adapter: PackedAdapter) -> None:
        self.counts.loads += 1
        self._cpu[adapter.info.digest] = adapter
        self._cpu.move_to_end(adapter.info.digest)
        while len(self._cpu) > self.cpu_capacity:
            others = [d for d in self._cpu if d != adapter.info.digest]
            victim = next((d for d in others if d not in self._wanted), others[0])
            del self._cpu[victim]
            log.info("adapter %s leaves CPU memory", victim[:12])

    def _sweep(self) -> None:
        """Empties the slots of dropped adapters once nobody holds them."""
        for digest in list(self._doomed):
            slot = self.slots.find(digest)
            self._cpu.pop(digest, None)
            if slot is None:
                self._doomed.discard(digest)
            elif slot.holders == 0:
                self.slots.deactivate(slot)
                self._doomed.discard(digest)

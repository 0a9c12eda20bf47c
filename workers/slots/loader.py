"""Loads adapters in threads: fetches files that lie elsewhere, checks them, and packs this rank's matrices in host
memory.

It holds nothing that it has loaded. WorkerLoRAManager holds the packed adapters; workers/follower.py does so on the
other ranks of a tensor-parallel replica.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from lorafleet.protocol.adapter_formats.adapter_files import DRAFT_FOLDER, AdapterFolder
from lorafleet.protocol.adapter_formats.sealed_memory import SealedContent, map_sealed
from lorafleet.protocol.errors import AdapterError, AdapterMissing, LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest, SealedAdapter
from lorafleet.resolvers.fetch_metrics import FetchTotals
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.adapter_parts import AdapterParts
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.mixed_forms import mix
from lorafleet.workers.adapters.parallel_reading import ParallelReader
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.adapters.weight_files import ReadTargets
from lorafleet.workers.slots.block_layout import read_targets
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import PackedAdapter, pack
from lorafleet.workers.slots.pinned_memory import PinnedMemory

log = logging.getLogger(__name__)

LOAD_THREADS = 4

T = TypeVar("T")


@dataclass(slots=True)
class _Waited:
    """Seconds in which a load has waited for files to reach this node."""

    seconds: float = 0.0


class AdapterLoader:
    """Loads adapters that are served on `base`. `store` fetches files that lie elsewhere."""

    def __init__(
        self,
        base: Base,
        config: LoRAConfig,
        slots: LoRAModelManager,
        dtype: torch.dtype,
        device: torch.device,
        store: AdapterStore,
        reader: ParallelReader | None = None,
        check: Callable[[LoRAModel], None] | None = None,
        drafts: AdapterLoader | None = None,
    ) -> None:
        """`check` raises an AdapterError for an adapter that this server does not serve. `drafts` packs draft LoRAs for
        the draft model, and ends with this loader; None if there is no such model."""
        self._store = store
        self._check = check
        self._drafts = drafts
        self._base = base
        self._config = config
        self._parts = slots.base_parts
        self._memory, self._extra_memory = slots.policy.memory, slots.extra_memory
        self._sharding = slots.sharding
        self._dtype = dtype
        self._pinned = PinnedMemory() if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="lora-load")
        self._reader = reader or ParallelReader()

    def submit(self, lora: LoRARequest) -> Future[PackedAdapter]:
        """Starts to load an adapter.

        The future's error is always a LorafleetError. It is raised for the adapter, or for a fault of our own, which
        is logged.
        """
        # Network fetches wait in another pool, so that local adapters need not wait for them.
        return (self._pool if self.is_here(lora) else self._store.pool).submit(self._load, lora)

    def is_here(self, lora: LoRARequest) -> bool:
        """Returns whether the adapter can be read without the network."""
        if lora.memory is not None:
            return True
        files = [part.lora for part in lora.parts] or [lora]
        return all(self._store.is_here(file.lora_path, file.digest) for file in files)

    @property
    def fetched(self) -> FetchTotals:
        """Totals of the files that were not on this node and were fetched."""
        return self._store.metrics.totals

    def stop(self) -> None:
        """Waits for the loads in progress to end. Fetches are abandoned."""
        self._store.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.stop()
        if self._drafts is not None:
            self._drafts._reader.stop()

    def free(self) -> None:
        """Frees the pinned memory. Call it after stop(), once no copy reads a packed adapter."""
        for loader in (self, self._drafts):
            if loader is not None and loader._pinned is not None:
                loader._pinned.close()

    def _load(self, lora: LoRARequest) -> PackedAdapter:
        """Loads one adapter; runs in a pool thread."""
        waited = _Waited()
        try:
            if lora.memory is not None:
                packed = self._read(lora, self._map(lora, lora.memory))
            elif lora.parts:
                packed = self._pack(self._mix(lora, waited))
            else:
                packed = self._read_files(lora, self._read, waited)
            return replace(packed, times=replace(packed.times, fetch_s=waited.seconds))
        except LorafleetError:
            raise
        except Exception as error:
            log.exception("adapter %s: loading failed", lora.lora_name)
            raise LorafleetError(f"adapter {lora.lora_name!r}: loading failed: {error!r}") from error

    def _read_files(self, lora: LoRARequest, read: Callable[[LoRARequest, AdapterFolder], T], waited: _Waited) -> T:
        """Returns the result of `read` on the adapter's folder, which is fetched first if it lies elsewhere."""
        started, before = time.monotonic(), waited.seconds

        def use(folder: Path) -> T:  # called twice if the first bytes were damaged
            waited.seconds = before + time.monotonic() - started
            return read(lora, AdapterFolder.at(folder, lora.within))

        return self._store.read(lora.lora_path, lora.digest, use)

    @staticmethod
    def _map(lora: LoRARequest, memory: SealedAdapter) -> SealedContent:
        content = map_sealed(memory)
        if content is None:
            raise AdapterMissing(f"adapter {lora.lora_name!r}: its content is no longer in the memory of this node.")
        return content

    def _read(self, lora: LoRARequest, source: AdapterFolder | SealedContent) -> PackedAdapter:
        model = LoRAModel.from_local_checkpoint(
            source,
            base=self._base,
            config=self._config,
            dtype=self._dtype,
            name=lora.lora_name,
            expected_digest=lora.digest,
            sharding=self._sharding,
            reader=self._reader,
            place=self._place if self._sharding.group.size == 1 else None,
            keeps_draft=self._drafts is not None,
        )
        packed = self._pack(model)  # It waits for the digest, which a damaged folder must not have.
        if self._drafts is None or model.draft is None:
            return packed
        return replace(packed, draft=self._drafts._pack_draft(lora, packed.info.digest, model.draft))

    def _pack_draft(self, lora: LoRARequest, digest: str, content: SealedContent) -> PackedAdapter | None:
        """Packs an adapter's draft LoRA for the draft model. Returns None if it does not fit this one, since the
        adapter's answers are the same without it."""
        draft = LoRARequest(f"{lora.lora_name}/{DRAFT_FOLDER}", lora.lora_int_id, "", digest)
        try:
            return self._read(draft, content)
        except AdapterError as error:
            log.warning("adapter %s is served without its draft LoRA: %s", digest[:12], error.message)
            return None

    def _mix(self, lora: LoRARequest, waited: _Waited) -> LoRAModel:
        started = time.perf_counter()
        parts = [(part, self._read_files(part.lora, self._read_forms, waited)) for part in lora.parts]
        forms = mix(parts, self._config.max_lora_rank)
        content = ContentDigest.known(lora.digest)
        return LoRAModel.of(forms, content, self._dtype, lora.lora_name, self._sharding, started)

    def _read_forms(self, lora: LoRARequest, folder: AdapterFolder) -> AdapterForms:
        read = read_adapter(
            folder,
            base=self._base,
            max_rank=self._config.max_lora_rank,
            dtype=self._dtype,
            name=lora.lora_name,
            expected_digest=lora.digest,
            reader=self._reader,
        )
        read.content.confirm()
        return read.forms

    def _pack(self, model: LoRAModel) -> PackedAdapter:
        if self._check is not None:
            self._check(model)
        adapter = pack(
            model,
            self._parts,
            self._dtype,
            self._allocate,
            lambda num_bytes, extra_bytes: self._check_size(model.name, num_bytes, extra_bytes),
            self._reader.for_each,
        )
        if self._pinned is not None:
            for block in adapter.blocks:
                self._pinned.pin(block)
        return adapter

    def _place(self, parts: AdapterParts) -> ReadTargets | None:
        return read_targets(parts, self._parts, self._dtype, self._allocate)

    def _check_size(self, name: str, num_bytes: int, extra_bytes: int) -> None:
        """Raises AdapterTooLarge if the adapter could never get a slot."""
        self._memory.check(num_bytes, name)
        self._extra_memory.check(extra_bytes, name)

    def _allocate(self, size: int) -> torch.Tensor:
        if self._pinned is None or size == 0:  # an adapter may have nothing but extras
            return torch.empty(size, dtype=torch.uint8)
        return self._pinned.take(size)

"""Writes adapters into the slots of one rank: the copies to the GPU, the tables and the memory of extras.

slot_policy.py decides which adapter gets which slot, and WorkerLoRAManager provides the packed adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import TILE_TOKENS, LoRABatch, static_tile_counts
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.slot_heads import SlotHeads
from lorafleet.workers.pool.pool_start import PoolStart
from lorafleet.workers.slots.adapter_copies import AdapterCopies
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.eviction import Demand
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.linear_extra_parts import address_rows
from lorafleet.workers.slots.lora_memory import Extent, LoRAMemory
from lorafleet.workers.slots.packed_adapter import PackedAdapter, slot_bytes
from lorafleet.workers.slots.slot_layers import SlotLayers
from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy
from lorafleet.workers.slots.slot_room import SlotRoom
from lorafleet.workers.slots.vocab_extras import slot_head
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.peer_memory import open_peer_memory
from lorafleet.workers.weak_method import weak

# Bytes of P (A's output) that each other rank can send. They suffice for all of a decode step, and for prompts up to
# the size from which on a collective is worth its cost.
EXCHANGE_BYTES = 2 << 20


class LoRAModelManager:
    """The adapter slots of one rank. `sharding` says which part of every adapter they hold.

    Args:
        pool: Provides the memory for A and B, if it is shared with KV blocks.
    """

    def __init__(
        self,
        model: EngineModel,
        config: LoRAConfig,
        dtype: torch.dtype,
        device: torch.device,
        pool: PoolStart | None = None,
    ) -> None:
        fully = config.is_fully_sharded(device)
        self._peers = open_peer_memory(model.group, device, EXCHANGE_BYTES) if fully else None
        areas = None if self._peers is None else self._peers.areas
        self.sharding = AdapterSharding(model.shard, model.group, fully, areas)
        self.dtype = dtype
        self.max_rank = config.max_lora_rank
        self.device = device
        self.base_parts = BaseParts.of(model, self.sharding)
        self.extra_memory = ExtraMemory(config.extra_memory_bytes, device)
        parts = self.base_parts
        self.tables = LoRATables(len(parts.linears), config.gpu_loras, device, len(parts.norms), len(parts.mixtures))
        self._layers = SlotLayers.attach(model, self.sharding, self.tables, self.max_rank, dtype)
        self.heads = SlotHeads(model.lm_head)
        self._ropes = None if model.rotations is None else model.rotations.add_slots(config.gpu_loras)
        largest = self._largest_bytes(config)
        num_bytes = config.lora_memory_bytes(largest) if pool is None else pool.own_bytes(config, largest)
        demand = Demand(config.cpu_loras)
        memory = LoRAMemory(num_bytes)
        self.policy = SlotPolicy(
            config.gpu_loras, config.max_loras, demand, memory, self.extra_memory, weak(self.mark_quiet)
        )
        self.room = SlotRoom(self.policy)
        self.arena: Tensor | None = None  # The memory for A and B. Its address never changes while adapters are in it.
        self._copies: AdapterCopies | None = None
        if device.type == "cuda":
            shared = None if pool is None else pool.arena
            self._take(torch.empty(num_bytes, dtype=torch.uint8, device=device) if shared is None else shared.memory)

    def leave_pool(self, config: LoRAConfig) -> None:
        """Replaces the pool's memory by as much as slots have without a pool. No adapter may be here yet."""
        memory = self.policy.memory
        assert not memory.num_used
        more = config.lora_memory_bytes(self._largest_bytes(config)) - memory.num_bytes
        if more > 0:  # The pool rounds up.
            memory.grow(memory.num_bytes, more)
            memory.most_bytes = memory.num_bytes
        if self.arena is not None:
            self.arena = self._copies = None  # The pool's memory is released before there is other memory.
            self._take(torch.empty(memory.num_bytes, dtype=torch.uint8, device=self.device))

    def _largest_bytes(self, config: LoRAConfig) -> int:
        """Returns the bytes of A and B of the largest adapter. The other ranks put their parts, which are no larger,
        into the same ranges as rank 0."""
        own = slot_bytes(self._layers.linears, config.max_lora_rank, self.dtype)
        return self.sharding.group.most(own, self.device)

    def _take(self, arena: Tensor) -> None:
        self.arena, self._copies = arena, AdapterCopies(arena)

    @property
    def slots(self) -> list[Slot]:
        return self.policy.slots

    @property
    def arena_bytes(self) -> int:
        """Bytes that this rank's GPU reserves for A and B, used or not. It is 0 on a CPU, where slots are views of host
        memory."""
        return 0 if self.arena is None else self.policy.memory.num_bytes

    def tile_counts(self, num_tokens: int, tile_tokens: int = TILE_TOKENS) -> list[int]:
        """Returns the tile counts of the static batches that steps of num_tokens should have."""
        return static_tile_counts(num_tokens, self.policy.max_in_use, tile_tokens)

    def static_batch(
        self,
        num_tokens: int,
        num_tiles: int,
        tile_tokens: int = TILE_TOKENS,
        takes_rare: bool = False,
        takes_experts: bool = False,
    ) -> LoRABatch:
        return LoRABatch.static(
            num_tokens, num_tiles, self.max_rank, self.tables, tile_tokens, takes_rare, takes_experts
        )

    def has_rare(self, slots: Sequence[int]) -> bool:
        """Returns what ExtraTables.has_rare does."""
        return self.tables.extras.has_rare(slots)

    def has_experts(self, slots: Sequence[int]) -> bool:
        """Returns what ExtraTables.has_experts does."""
        return self.tables.extras.has_experts(slots)

    def mark_quiet(self, slot: Slot) -> None:
        """Records that no step queued from now on reads the slot's present content."""
        if self.arena is not None:
            slot.quiet = torch.cuda.Event()  # a new event, since extras that are being freed refer to the last one
            slot.quiet.record(torch.cuda.current_stream(self.device))

    def activate(
        self, adapter: PackedAdapter, slot: Slot, tenant: str = "", extents: Sequence[Extent] | None = None
    ) -> None:
        """Starts to fill the slot, which may be used once slot.is_ready.

        There must be room for the adapter, see SlotRoom.is_free().

        Args:
            tenant: The tenant whose request waits for the adapter.
            extents: Where rank 0 has put its part. None on rank 0.
        """
        assert slot.is_idle
        self.evict(slot)
        found = self.policy.memory.find(adapter.cuts) if extents is None else extents
        assert found is not None, "there is no room"
        self.policy.memory.take(found)
        slot.extents = tuple(found)
        if self._copies is not None:
            self._upload(adapter, slot, self._copies)
        else:
            self._use_in_place(adapter, slot)
        if adapter.extra is not None and slot.extra is not None:
            self.heads.set_slot(slot.index, slot_head(adapter.extra, slot.extra))
        self.policy.assign(slot, adapter, tenant)

    def evict(self, slot: Slot) -> None:
        """Empties the slot for lack of room."""
        self.deactivate(slot, for_room=True)

    def deactivate(self, slot: Slot, *, for_room: bool = False) -> None:
        assert slot.holders == 0
        if slot.digest is None:
            return
        if slot.ready is not None:
            slot.ready.synchronize()
        self.heads.set_slot(slot.index, None)
        if slot.extra is not None:
            self.extra_memory.give_back(slot.extra, slot.quiet)
        self.policy.memory.give_back(slot.extents)
        if self._copies is not None:
            self._copies.leave(slot.extents, slot.quiet)
        self.policy.clear(slot, for_room=for_room)
        if self.arena is None:
            self._layers.set_slot(slot.index, None, None)

    def wait_for_copies(self) -> None:
        if self._copies is not None:
            self._copies.stream.synchronize()

    def _use_in_place(self, adapter: PackedAdapter, slot: Slot) -> None:
        """Uses the adapter's host memory as the slot's content, on a CPU."""
        slot.extra = None if adapter.extra is None else self.extra_memory.place(adapter.extra)
        self._layers.set_slot(slot.index, adapter, slot.extra)
        self._write_extras(slot)
        self._write_rope(slot, adapter.rope)

    def _write_extras(self, slot: Slot) -> None:
        """Writes the slot's column of the device tables, on the current stream."""
        extras = self.tables.extras
        extras.write_slot(slot.index, None if slot.extra is None else address_rows(slot.extra, self.base_parts, extras))

    def _write_rope(self, slot: Slot, rope: RopeConfig | None) -> None:
        """Writes the angles of the slot's tokens, on the current stream."""
        assert self._ropes is not None or rope is None, "the reader rejects such an adapter"
        if self._ropes is not None:
            self._ropes.write_slot(slot.index, rope)
        rope_slots = self.tables.extras.rope_slots
        rope_slots.discard(slot.index)
        if rope is not None:
            rope_slots.add(slot.index)

    def _upload(self, adapter: PackedAdapter, slot: Slot, copies: AdapterCopies) -> None:
        """Queues the copy to the GPU. The host waits for nothing."""
        with torch.cuda.stream(copies.stream):
            if slot.quiet is not None:
                copies.stream.wait_event(slot.quiet)  # steps may still read the slot's rows of the tables
            address_LA = copies.copy(adapter, slot.extents)
            self.tables.write_slot(slot.index, adapter.table, address_LA)
            slot.extra = None if adapter.extra is None else self.extra_memory.place(adapter.extra)
            self._write_extras(slot)
            self._write_rope(slot, adapter.rope)
            slot.ready = torch.cuda.Event()
            slot.ready.record(copies.stream)

"""Decides which adapters sit in which slot, and puts them there. Knows nothing of files or requests' texts:
WorkerLoRAManager brings packed adapters, the scheduler says which slots are in use.

A slot is held while a sequence uses it; a held or pinned slot is never overwritten. Each overwriting counts the slot's
generation up.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.extras.slot_embedding import EmbeddingSlots
from lorafleet.kernels.lora.lora_batch import TILE_TOKENS, LoRABatch, static_tile_counts
from lorafleet.kernels.lora.norm_slots import NormSlots
from lorafleet.kernels.lora.packed_lora import LoRATables, PackedLoRA
from lorafleet.kernels.moe.expert_lora import ExpertLoRA
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.slot_heads import SlotHeads
from lorafleet.workers.slots.base_parts import BasePart, BaseParts
from lorafleet.workers.slots.eviction import Credits, Demand
from lorafleet.workers.slots.expert_extras import expert_weights
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.fair_shares import FairShares
from lorafleet.workers.slots.linear_extra_parts import address_rows, linear_extras, norm_weight
from lorafleet.workers.slots.lora_model import expert_dtype
from lorafleet.workers.slots.packed_adapter import PackedAdapter, slot_bytes
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES
from lorafleet.workers.slots.vocab_extras import slot_embedding, slot_head
from lorafleet.workers.slots.vocab_weights import vocab_dtype
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.peer_memory import open_peer_memory

# Of P that each other rank sends: all of a decode step's, and of prompts as much as makes a collective worth its while.
EXCHANGE_BYTES = 2 << 20


@dataclass(slots=True)
class Slot:
    """holders: sequences in flight. ready: None once the copy to the GPU is known to be done. quiet: the steps that may
    read the slot's present content, set when nobody holds it any more; they may still be queued. extra: the adapter's
    extras on the serving device, None where it has none."""

    index: int
    generation: int = 0
    digest: str | None = None
    adapter: PackedAdapter | None = None
    holders: int = 0
    pinned: bool = False
    ready: torch.cuda.Event | None = None
    quiet: torch.cuda.Event | None = None
    extra: ExtraBlock | None = None

    @property
    def is_ready(self) -> bool:
        """Whether no copy into it is under way."""
        if self.ready is not None and self.ready.query():
            self.ready = None
        return self.ready is None


class LoRAModelManager:
    """sharding: which part of every adapter this rank's slots hold."""

    def __init__(self, model: DecoderModel, config: LoRAConfig, dtype: torch.dtype, device: torch.device) -> None:
        fully = config.is_fully_sharded(device)
        self._peers = open_peer_memory(model.group, device, EXCHANGE_BYTES) if fully else None
        areas = None if self._peers is None else self._peers.areas
        self.sharding = AdapterSharding(model.shard, model.group, fully, areas)
        self.dtype = dtype
        self.max_rank = config.max_lora_rank
        self.device = device
        linears = model.packed_linears()
        norms, mixtures = model.norms(), model.mixtures()
        self.base_parts = BaseParts(
            [BasePart(names, self.sharding.place(names), _on_cpu(linear.added_bias)) for names, linear in linears],
            [name for name, _ in norms],
            1.0 if model.config.norm_adds_one else 0.0,
            [name for name, _ in mixtures],
        )
        self.extra_memory = ExtraMemory(config.extra_memory_bytes, device)
        self.slots = [Slot(i) for i in range(config.max_loras)]
        self.num_activations = 0
        self.num_evictions = 0
        self._of_digest: dict[str, Slot] = {}
        self.demand = Demand(config.cpu_loras)
        self._credits = Credits(self.demand)
        self._shares = FairShares(self.demand)
        self.tables = LoRATables(len(linears), config.max_loras, device, len(norms), len(mixtures))
        self._linears: list[PackedLoRA] = []
        for i, (names, linear) in enumerate(linears):
            linear.lora = _packed_lora(i, names, self.sharding, self.tables)
            linear.lora.dtype = dtype
            assert linear.lora.in_features == linear.in_features, "the base and its adapters are divided alike"
            self._linears.append(linear.lora)
        self._norms: list[NormSlots] = []
        for i, (_, norm) in enumerate(norms):
            norm.slots = NormSlots(i, self.tables)
            self._norms.append(norm.slots)
        self._mixtures: list[tuple[ExpertLoRA, ExpertLoRA]] = []
        for i, (_, mixture) in enumerate(mixtures):
            up, down = (ExpertLoRA(i, k, self.tables, config.max_lora_rank, expert_dtype(dtype)) for k in range(2))
            mixture.lora = up, down
            self._mixtures.append(mixture.lora)
        self._embeddings = model.embed_tokens.slots = EmbeddingSlots(self.tables, vocab_dtype(dtype))
        self.heads = SlotHeads(model.lm_head)
        self._stride = slot_bytes(self._linears, config.max_lora_rank, dtype)
        # One region a slot, so that any max_loras adapters fit without fragmentation and addresses never change.
        self._arena: torch.Tensor | None = None
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._arena = torch.empty(config.max_loras, self._stride, dtype=torch.uint8, device=device)
            self._copy_stream = torch.cuda.Stream(device)

    def tile_counts(self, num_tokens: int, tile_tokens: int = TILE_TOKENS) -> list[int]:
        """Of the static batches that steps of so many tokens should have."""
        return static_tile_counts(num_tokens, len(self.slots), tile_tokens)

    def static_batch(
        self, num_tokens: int, num_tiles: int, tile_tokens: int = TILE_TOKENS, takes_kronecker: bool = False
    ) -> LoRABatch:
        return LoRABatch.static(num_tokens, num_tiles, self.max_rank, self.tables, tile_tokens, takes_kronecker)

    def adds_kronecker(self, slots: Sequence[int]) -> bool:
        """Whether one of them does; BASE_SLOT does not."""
        return not self.tables.extras.kronecker_slots.isdisjoint(slots)

    def find(self, digest: str) -> Slot | None:
        """The slot that holds the adapter, whether its copy has finished or not."""
        return self._of_digest.get(digest)

    @property
    def num_bytes(self) -> int:
        """Of the adapters in slots, over all ranks."""
        return sum(slot.adapter.info.num_bytes for slot in self.slots if slot.adapter is not None)

    @property
    def num_idle(self) -> int:
        """Slots that are empty, or whose adapter no sequence needs now; pinned ones are not to be had."""
        return sum(1 for slot in self.slots if slot.holders == 0 and not slot.pinned)

    @property
    def num_pinned(self) -> int:
        return sum(1 for slot in self.slots if slot.pinned)

    @property
    def arena_bytes(self) -> int:
        """That this rank's GPU keeps for slots, whether they are full or not; none on a CPU, where they are views of
        host memory."""
        return 0 if self._arena is None else self._arena.numel()

    @property
    def digests(self) -> KeysView[str]:
        """Of the adapters in slots, those among them whose copies are under way."""
        return self._of_digest.keys()

    @property
    def ranks(self) -> list[int]:
        """Of each slot, the largest rank over all modules; 0 where it is empty."""
        return [0 if slot.adapter is None else slot.adapter.info.rank for slot in self.slots]

    def pin(self, slot: Slot) -> None:
        """Its place is no tenant's: the operator has taken it away from all."""
        if not slot.pinned and slot.digest is not None:
            slot.pinned = True
            self._shares.release(slot.digest)

    def unpin(self, slot: Slot) -> None:
        slot.pinned = False

    def hold(self, slot_index: int, tenant: str = "") -> None:
        """tenant: whose sequence uses the slot; "" is that of all without one."""
        slot = self.slots[slot_index]
        assert slot.adapter is not None
        slot.holders += 1
        if not slot.pinned:
            self._shares.charge(slot.adapter.info.digest, tenant)
        self._credits.use(slot.adapter.info.digest, slot.adapter.info.num_bytes)

    def let_go(self, slot_index: int) -> None:
        slot = self.slots[slot_index]
        assert slot.holders > 0
        slot.holders -= 1
        if slot.holders == 0:
            self.mark_quiet(slot)

    def mark_quiet(self, slot: Slot) -> None:
        """No step that is queued from now on reads the slot's present content."""
        if self._arena is not None:
            slot.quiet = torch.cuda.Event()  # a new one: extras that are leaving have the one before
            slot.quiet.record(torch.cuda.current_stream(self.device))

    def free_slot(self, wanted: Sequence[str] = (), keep: Sequence[str] = (), tenant: str = "") -> Slot | None:
        """An empty slot, or one that nobody holds and that is not pinned: the one with the least credit of those nobody
        waits for, else the one that is wanted last. Never one that has an adapter of `keep`, or is being filled, or is
        in another tenant's share."""
        turn = _turns(wanted)
        return min(
            self._losers(tenant, self._usable(keep)), key=lambda slot: self._reluctance(slot, turn), default=None
        )

    def _usable(self, keep: Sequence[str]) -> list[Slot]:
        return [s for s in self.slots if s.holders == 0 and not s.pinned and s.digest not in keep and s.is_ready]

    def _losers(self, tenant: str, slots: list[Slot]) -> list[Slot]:
        """Of these slots, the empty ones and those that the tenant may have emptied for one more adapter."""
        losing = self._shares.losers(tenant, [slot.digest for slot in slots if slot.digest is not None])
        return [slot for slot in slots if slot.digest is None or slot.digest in losing]

    def _reluctance(self, slot: Slot, turn: Mapping[str, int]) -> tuple[int, tuple[float, int]]:
        return (-1, (0.0, 0)) if slot.digest is None else (turn.get(slot.digest, 0), self._credits.of(slot.digest))

    def has_room(self, adapter: PackedAdapter, slot: Slot) -> bool:
        """Whether the slot can be filled now: what is leaving has left. A plain adapter needs none."""
        return adapter.extra is None or (slot.extra is None and self.extra_memory.is_free(adapter.extra_bytes))

    def to_empty(
        self,
        adapter: PackedAdapter,
        slot: Slot,
        wanted: Sequence[str] = (),
        keep: Sequence[str] = (),
        tenant: str = "",
    ) -> list[Slot] | None:
        """The idle slots, `slot` first, that must be emptied so that the adapter's extras have room; None where the
        others, which are in use, take too much. wanted, keep: as free_slot has them. Slots in other tenants' shares
        come last; they are not spared, as the room that the extras take is in nobody's share."""
        if adapter.extra is None:
            return []
        given: list[Slot] = [slot] if slot.extra is not None else []
        turn = _turns(wanted)
        idle = [s for s in self._usable(keep) if s is not slot and s.extra is not None]
        losers = self._losers(tenant, idle)
        idle.sort(key=lambda s: (s not in losers, self._reluctance(s, turn)), reverse=True)
        while self.extra_memory.missing(adapter.extra_bytes) > sum(s.adapter.extra_bytes for s in given if s.adapter):
            if not idle:
                return None
            given.append(idle.pop())
        return given

    def to_drain(self, adapter: PackedAdapter, closed: set[int], tenant: str = "") -> list[Slot]:
        """The slots, not of `closed` or pinned or another tenant's share, that no new sequence should take, so that the
        adapter gets one soon and room for its extras: those that fewest sequences hold."""
        usable = self._losers(tenant, [s for s in self.slots if s.index not in closed and not s.pinned])
        usable.sort(key=lambda s: s.holders)
        missing = self.extra_memory.missing(adapter.extra_bytes) if adapter.extra is not None else 0
        drained: list[Slot] = []
        for slot in usable:
            if missing > 0 and slot.extra is not None:
                drained.append(slot)
                missing -= slot.extra.num_bytes
        return drained or usable[:1]

    def activate(self, adapter: PackedAdapter, slot: Slot, tenant: str = "") -> None:
        """Starts to fill the slot; it may be used once slot.is_ready. There is room for its extras: has_room().
        tenant: whose request waits for it."""
        assert slot.holders == 0 and not slot.pinned
        assert adapter.block.numel() <= self._stride
        self.evict(slot)
        if self._arena is not None and self._copy_stream is not None:
            self._upload(adapter, slot, self._arena[slot.index], self._copy_stream)
        else:
            self._use_in_place(adapter, slot)
        slot.digest, slot.adapter = adapter.info.digest, adapter
        if adapter.extra is not None and slot.extra is not None:
            self.heads.set_slot(slot.index, slot_head(adapter.extra, slot.extra))
        self._credits.use(adapter.info.digest, adapter.info.num_bytes)
        self._shares.charge(adapter.info.digest, tenant)
        self._of_digest[adapter.info.digest] = slot
        self.num_activations += 1

    def evict(self, slot: Slot) -> None:
        """For want of room."""
        if slot.digest is not None:
            self._credits.evict(slot.digest)
        self.deactivate(slot)

    def deactivate(self, slot: Slot) -> None:
        assert slot.holders == 0
        if slot.digest is None:
            return
        if slot.ready is not None:
            slot.ready.synchronize()
        del self._of_digest[slot.digest]
        self._credits.forget(slot.digest)
        self._shares.release(slot.digest)
        self.heads.set_slot(slot.index, None)
        if slot.extra is not None:
            self.extra_memory.give_back(slot.extra, slot.quiet)
        slot.digest, slot.adapter, slot.extra, slot.ready, slot.pinned = None, None, None, None, False
        slot.generation += 1
        self.num_evictions += 1
        if self._arena is None:
            self._set_slot(slot.index, None, None)

    def wait_for_copies(self) -> None:
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def _use_in_place(self, adapter: PackedAdapter, slot: Slot) -> None:
        """On a CPU."""
        slot.extra = None if adapter.extra is None else self.extra_memory.place(adapter.extra)
        self._set_slot(slot.index, adapter, slot.extra)
        self._write_extras(slot)

    def _set_slot(self, index: int, adapter: PackedAdapter | None, extra: ExtraBlock | None) -> None:
        """The torch twin's tensors."""
        for i, linear in enumerate(self._linears):
            weights = None
            if adapter is not None:
                weights = adapter.weights(i, linear.in_features, linear.out_features, linear.layout)
            linear.set_slot(index, weights)
            linear.extras[index] = None if extra is None else linear_extras(extra, i)
        for i, norm in enumerate(self._norms):
            norm.set_slot(index, None if extra is None else norm_weight(extra, i))
        for i, mixture in enumerate(self._mixtures):
            for k, lora in enumerate(mixture):
                lora.slots[index] = None if extra is None else expert_weights(extra, i, k)
        self._embeddings.set_slot(index, None if extra is None else slot_embedding(extra))

    def _write_extras(self, slot: Slot) -> None:
        """The device tables' column, on the current stream."""
        extras = self.tables.extras
        extras.write_slot(slot.index, None if slot.extra is None else address_rows(slot.extra, self.base_parts, extras))

    def _upload(self, adapter: PackedAdapter, slot: Slot, target: Tensor, stream: torch.cuda.Stream) -> None:
        """Costs the host a launch for each piece; the host waits for nothing."""
        block = adapter.block
        with torch.cuda.stream(stream):
            if slot.quiet is not None:
                stream.wait_event(slot.quiet)
            for to, piece in zip(target[: block.numel()].split(PIECE_BYTES), block.split(PIECE_BYTES), strict=True):
                to.copy_(piece, non_blocking=True)
            self.tables.write_slot(slot.index, adapter.table, target.data_ptr())
            slot.extra = None if adapter.extra is None else self.extra_memory.place(adapter.extra)
            self._write_extras(slot)
            slot.ready = torch.cuda.Event()
            slot.ready.record(stream)


def _turns(wanted: Sequence[str]) -> dict[str, int]:
    """The larger, the sooner."""
    return {digest: len(wanted) - i for i, digest in enumerate(wanted)}


def _on_cpu(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float().cpu()


def _packed_lora(index: int, names: tuple[str, ...], sharding: AdapterSharding, tables: LoRATables) -> PackedLoRA:
    """names: the module paths of its projections, which share an input and so a layout."""
    inputs = sharding.input(names[0])
    out_features = tuple(sum(part.stop - part.start for part in sharding.outputs(name)) for name in names)
    layout, place = sharding.layout(names[0]), sharding.place(names)
    return PackedLoRA(index, inputs.stop - inputs.start, out_features, tables, layout, place)

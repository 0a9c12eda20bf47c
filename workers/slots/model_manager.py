"""Decides which adapter occupies which slot, and fills the slots. It knows nothing of files or requests' texts:
WorkerLoRAManager provides packed adapters, and the scheduler says which slots are in use.

A slot is held while a sequence uses it. A held or pinned slot is never overwritten. Each time an adapter leaves a
slot, the slot's generation increases by one.
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

# Bytes of P (A's output) that each other rank can send. They suffice for all of a decode step, and for prompts up to
# the size from which on a collective is worth its cost.
EXCHANGE_BYTES = 2 << 20


@dataclass(slots=True)
class Slot:
    """A place for one adapter on this rank's device."""

    index: int
    generation: int = 0
    digest: str | None = None
    adapter: PackedAdapter | None = None
    holders: int = 0  # Sequences in flight that use the slot.
    pinned: bool = False
    # Event at the end of the copy to the GPU; None once the copy is known to be done.
    ready: torch.cuda.Event | None = None
    # Ends the steps that may read the present content, which may still be queued. Set when the last holder leaves.
    # Event behind the steps that may read the present content. Set when the last holder leaves; they may still be
    # queued.
    quiet: torch.cuda.Event | None = None
    extra: ExtraBlock | None = None  # The adapter's extras on the serving device; None if it has none.

    @property
    def is_ready(self) -> bool:
        """Whether no copy into the slot is in progress."""
        if self.ready is not None and self.ready.query():
            self.ready = None
        return self.ready is None


class LoRAModelManager:
    """The adapter slots of one rank. `sharding` says which part of every adapter they hold."""

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
        # Each slot has its own region, so that any max_loras adapters fit without fragmentation and addresses never
        # change.
        self._arena: torch.Tensor | None = None
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._arena = torch.empty(config.max_loras, self._stride, dtype=torch.uint8, device=device)
            self._copy_stream = torch.cuda.Stream(device)

    def tile_counts(self, num_tokens: int, tile_tokens: int = TILE_TOKENS) -> list[int]:
        """Returns the tile counts of the static batches that steps of num_tokens should have."""
        return static_tile_counts(num_tokens, len(self.slots), tile_tokens)

    def static_batch(
        self, num_tokens: int, num_tiles: int, tile_tokens: int = TILE_TOKENS, takes_kronecker: bool = False
    ) -> LoRABatch:
        return LoRABatch.static(num_tokens, num_tiles, self.max_rank, self.tables, tile_tokens, takes_kronecker)

    def adds_kronecker(self, slots: Sequence[int]) -> bool:
        """Returns whether an adapter in one of these slots has Kronecker products. BASE_SLOT never does."""
        return not self.tables.extras.kronecker_slots.isdisjoint(slots)

    def find(self, digest: str) -> Slot | None:
        """Returns the slot that holds the adapter, whether its copy has finished or not, or None."""
        return self._of_digest.get(digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots, over all ranks."""
        return sum(slot.adapter.info.num_bytes for slot in self.slots if slot.adapter is not None)

    @property
    def num_idle(self) -> int:
        """Number of slots, empty or not, that no sequence holds and that are not pinned."""
        return sum(1 for slot in self.slots if slot.holders == 0 and not slot.pinned)

    @property
    def num_pinned(self) -> int:
        return sum(1 for slot in self.slots if slot.pinned)

    @property
    def arena_bytes(self) -> int:
        """Bytes that this rank's GPU reserves for slots, full or not. It is 0 on a CPU, where slots are views of host
        memory."""
        return 0 if self._arena is None else self._arena.numel()

    @property
    def digests(self) -> KeysView[str]:
        """Digests of the adapters in slots, including those whose copies are in progress."""
        return self._of_digest.keys()

    @property
    def ranks(self) -> list[int]:
        """The largest LoRA rank over all modules for each slot; 0 for an empty slot."""
        return [0 if slot.adapter is None else slot.adapter.info.rank for slot in self.slots]

    def pin(self, slot: Slot) -> None:
        """Pins the slot, which is then in no tenant's share: the operator has taken it away from all."""
        if not slot.pinned and slot.digest is not None:
            slot.pinned = True
            self._shares.release(slot.digest)

    def unpin(self, slot: Slot) -> None:
        slot.pinned = False

    def hold(self, slot_index: int, tenant: str = "") -> None:
        """Counts one more sequence of this tenant that uses the slot. "" stands for all callers without a tenant."""
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
        """Records that no step queued from now on reads the slot's present content."""
        if self._arena is not None:
            slot.quiet = torch.cuda.Event()  # a new event, since extras that are being freed refer to the last one
            slot.quiet.record(torch.cuda.current_stream(self.device))

    def free_slot(self, wanted: Sequence[str] = (), keep: Sequence[str] = (), tenant: str = "") -> Slot | None:
        """Returns a slot that can be filled, or None.

        An empty slot comes first. Then comes the adapter with the least credit among those that nobody waits for, then
        the adapter that is wanted last. Slots that are held, pinned or being filled, that have an adapter of `keep`,
        or that are in another tenant's share are never returned.
        """
        turn = _turns(wanted)
        return min(
            self._losers(tenant, self._usable(keep)), key=lambda slot: self._reluctance(slot, turn), default=None
        )

    def _usable(self, keep: Sequence[str]) -> list[Slot]:
        return [s for s in self.slots if s.holders == 0 and not s.pinned and s.digest not in keep and s.is_ready]

    def _losers(self, tenant: str, slots: list[Slot]) -> list[Slot]:
        """Returns those of these slots that are empty, or that may be emptied so that the tenant gets one more
        adapter."""
        losing = self._shares.losers(tenant, [slot.digest for slot in slots if slot.digest is not None])
        return [slot for slot in slots if slot.digest is None or slot.digest in losing]

    def _reluctance(self, slot: Slot, turn: Mapping[str, int]) -> tuple[int, tuple[float, int]]:
        return (-1, (0.0, 0)) if slot.digest is None else (turn.get(slot.digest, 0), self._credits.of(slot.digest))

    def has_room(self, adapter: PackedAdapter, slot: Slot) -> bool:
        """Returns whether the slot can be filled now, because freed memory suffices for the extras. A plain adapter
        needs none."""
        return adapter.extra is None or (slot.extra is None and self.extra_memory.is_free(adapter.extra_bytes))

    def to_empty(
        self,
        adapter: PackedAdapter,
        slot: Slot,
        wanted: Sequence[str] = (),
        keep: Sequence[str] = (),
        tenant: str = "",
    ) -> list[Slot] | None:
        """Returns the idle slots, `slot` first, that must be emptied so that the adapter's extras have room.

        Returns None if the slots in use take too much. `wanted` and `keep` are as in free_slot. Slots in other
        tenants' shares come last. They are not spared, since the memory for extras is in nobody's share.
        """
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
        """Returns the slots that no new sequence should take, so that the adapter soon gets a slot and room for its
        extras.

        These are the slots that fewest sequences hold. Slots of `closed`, pinned slots and slots in other tenants'
        shares are left out.
        """
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
        """Starts to fill the slot, which may be used once slot.is_ready.

        There must be room for the adapter's extras, see has_room(). `tenant` is the tenant whose request waits for the
        adapter.
        """
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
        """Empties the slot for lack of room."""
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
        """Uses the adapter's host memory as the slot's content, on a CPU."""
        slot.extra = None if adapter.extra is None else self.extra_memory.place(adapter.extra)
        self._set_slot(slot.index, adapter, slot.extra)
        self._write_extras(slot)

    def _set_slot(self, index: int, adapter: PackedAdapter | None, extra: ExtraBlock | None) -> None:
        """Sets the torch twin's tensors of the slot."""
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
        """Writes the slot's column of the device tables, on the current stream."""
        extras = self.tables.extras
        extras.write_slot(slot.index, None if slot.extra is None else address_rows(slot.extra, self.base_parts, extras))

    def _upload(self, adapter: PackedAdapter, slot: Slot, target: Tensor, stream: torch.cuda.Stream) -> None:
        """Queues the copy to the GPU. The host launches one copy for each piece and waits for nothing."""
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
    """Returns a number for each digest: the larger it is, the sooner the adapter is wanted."""
    return {digest: len(wanted) - i for i, digest in enumerate(wanted)}


def _on_cpu(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float().cpu()


def _packed_lora(index: int, names: tuple[str, ...], sharding: AdapterSharding, tables: LoRATables) -> PackedLoRA:
    """Builds the PackedLoRA of one linear. `names` are the module paths of its projections, which share an input and
    therefore a layout."""
    inputs = sharding.input(names[0])
    out_features = tuple(sum(part.stop - part.start for part in sharding.outputs(name)) for name in names)
    layout, place = sharding.layout(names[0]), sharding.place(names)
    return PackedLoRA(index, inputs.stop - inputs.start, out_features, tables, layout, place)

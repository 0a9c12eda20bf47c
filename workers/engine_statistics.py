"""Collects the gauges and totals of one engine, for /metrics and the router."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lorafleet.protocol.engine_control import MemoryTag
from lorafleet.protocol.messages import EngineStats, KVEventStats, KVTierStats
from lorafleet.protocol.step_metrics import StepMetrics
from lorafleet.resolvers.fetch_metrics import FetchTotals
from lorafleet.workers.answer_progress import AnswerProgress
from lorafleet.workers.schedule.admission import QueueAdmission
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.cpu_tier import LoadCounts
from lorafleet.workers.slots.lora_memory import LoRAMemory
from lorafleet.workers.slots.slot_policy import Slot
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.runner import ModelRunner

_KINDS: Mapping[MemoryTag, tuple[str, ...]] = {  # kinds of memory that leave together, see _fixed_memory()
    "weights": ("weights", "lora_slots"),
    "kv_cache": ("kv_cache", "states", "state_snapshots"),
}


@dataclass(frozen=True)
class _NoSlots:
    """Stands in for SlotPolicy in an engine without LoRA."""

    slots: tuple[Slot, ...] = ()
    num_idle: int = 0
    num_pinned: int = 0
    num_activations: int = 0
    num_evictions: int = 0
    num_bytes: int = 0
    num_in_use: int = 0
    max_in_use: int = 0
    num_usable: int = 0
    memory: LoRAMemory = field(default_factory=lambda: LoRAMemory(0))


@dataclass(frozen=True)
class _NoAdapters:
    """Stands in for WorkerLoRAManager in an engine without LoRA."""

    slots: _NoSlots = field(default_factory=_NoSlots)
    counts: LoadCounts = field(default_factory=LoadCounts)
    fetched: FetchTotals = field(default_factory=FetchTotals)
    cpu_bytes: int = 0

    def resident_cpu(self) -> list[str]:
        return []


class EngineStatistics:
    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, admission: QueueAdmission, answers: AnswerProgress
    ) -> None:
        self.steps = StepMetrics()
        self._runner = runner
        self._scheduler = scheduler
        self._admission = admission
        self._answers = answers
        self._adapters: WorkerLoRAManager | _NoAdapters = runner.loras or _NoAdapters()
        self._fixed_memory = _fixed_memory(runner)

    @property
    def num_adapter_moves(self) -> int:
        """Number of moves of adapters between tiers so far."""
        slots = self._adapters.slots
        return self._adapters.counts.loads + slots.num_activations + slots.num_evictions

    def read(self, sequences: Collection[Sequence], num_pending: int) -> EngineStats:
        """Returns the present values. `sequences` are all unfinished ones, of which num_pending wait for a grammar."""
        scheduler, kv, adapters, slots = self._scheduler, self._scheduler.kv, self._adapters, self._adapters.slots
        resident = [slot.digest or "" for slot in slots.slots]
        cpu = adapters.resident_cpu()
        size = self._runner.steps.model.group.size
        pool = None if self._runner.loras is None else self._runner.loras.filler.pool
        fetched, late, snapshots = adapters.fetched, self._runner.steps.late, scheduler.memory.snapshots
        return EngineStats(
            paused=scheduler.pause,
            sleeping=int(bool(self._runner.memory.asleep)),
            base_digest=self._runner.memory.base.digest,
            base_changes_total=self._runner.memory.base.num_changes,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + num_pending + scheduler.num_aside,
            running_tokens=sum(len(sequence.tokens) for sequence in scheduler.running),
            waiting_tokens=scheduler.waiting.num_tokens,
            kv_blocks_total=kv.num_blocks - (0 if pool is None else pool.num_blocks),
            kv_blocks_free=kv.num_free,
            prompt_tokens_total=self._answers.num_prompt_tokens,
            generation_tokens_total=self._answers.num_generated_tokens,
            prefix_cache_queries_total=kv.counts.query_tokens,
            prefix_cache_hits_total=kv.counts.hit_tokens,
            prefixes_kept_since_s=kv.counts.forgotten_s if kv.enable_prefix_caching else math.inf,
            state_snapshots_total=0 if snapshots is None else snapshots.pool.num_slots,
            state_snapshots_used=0 if snapshots is None else snapshots.pool.num_used,
            kv_events=KVEventStats() if scheduler.memory.events is None else scheduler.memory.events.publisher.stats(),
            kv_tiers=KVTierStats() if scheduler.memory.tiers is None else scheduler.memory.tiers.stats(),
            preemptions_total=scheduler.num_preemptions,
            refused_total=dict(self._admission.refused),
            steps_total=self.steps.num_steps,
            steps=self.steps.stats(self._runner.steps_on_gpu()),
            attention_waits=int(late.awaits_attention),
            attention_switched_s=late.switched_s,
            decode_graphs=late.num_decode_graphs,
            memory_bytes=self._memory(),
            lora_slots_total=len(slots.slots),
            lora_slots_used=sum(map(bool, resident)),
            lora_slots_idle=slots.num_idle,
            lora_slots_pinned=slots.num_pinned,
            lora_adapters_wanted=len({sequence.lora.digest for sequence in sequences if sequence.lora is not None}),
            lora_cpu_adapters=len(cpu),
            lora_loads_total=adapters.counts.loads,
            lora_load_failures_total=adapters.counts.failures,
            lora_load_seconds_total=adapters.counts.seconds,
            lora_fetches_total=fetched.fetched,
            lora_fetch_failures_total=fetched.failed,
            lora_fetched_bytes_total=fetched.num_bytes,
            lora_neighbor_fetches_total=dict(fetched.from_neighbors),
            lora_activations_total=slots.num_activations,
            lora_evictions_total=slots.num_evictions,
            lora_cpu_evictions_total=adapters.counts.cpu_evictions,
            lora_slot_bytes=slots.num_bytes,
            lora_in_use=slots.num_in_use,
            lora_in_use_limit=slots.max_in_use,
            lora_usable=slots.num_usable,
            lora_memory_total_bytes=slots.memory.num_bytes * size,
            lora_memory_used_bytes=slots.memory.num_used * size,
            lora_memory_borrowed_bytes=0 if pool is None else pool.borrowed_bytes,
            lora_memory_moves_total={}
            if pool is None
            else {"lent": pool.counts.lent, "returned": pool.counts.returned},
            lora_cpu_bytes=adapters.cpu_bytes,
            waiting_adapters=[lora.digest for lora in scheduler.waiting.adapters()[0]],
            resident_slots=resident,
            pinned_slots=[slot.index for slot in slots.slots if slot.pinned],
            resident_cpu=cpu,
        )

    def _memory(self) -> dict[str, int]:
        given_back = {kind for tag in self._runner.memory.asleep for kind in _KINDS[tag]}
        fixed = {kind: 0 if kind in given_back else num_bytes for kind, num_bytes in self._fixed_memory.items()}
        memory = fixed | {"penalties": self._runner.counts_bytes}
        if self._scheduler.memory.tiers is not None:
            memory["kv_host"] = self._scheduler.memory.tiers.host_bytes
        if self._runner.loras is None:
            return memory
        if self._runner.loras.filler.pool is not None:
            borrowed = self._runner.loras.filler.pool.borrowed_bytes
            memory |= {"kv_cache": memory["kv_cache"] - borrowed, "lora_slots": memory["lora_slots"] + borrowed}
        extra = self._runner.loras.slots.extra_memory.num_bytes * self._runner.steps.model.group.size
        return memory | {"lora_extra": extra, "lora_cpu": self._adapters.cpu_bytes}


def _fixed_memory(runner: ModelRunner) -> dict[str, int]:
    """Returns the bytes that the replica's GPUs (or its host memory on a CPU) hold while it is awake, by kind.

    All ranks hold equally many. Activations and graphs are torch's, and not included.

    - weights: the base's
    - kv_cache: all its blocks, free or not, with those that adapters may borrow
    - states: of recurrent layers, for all sequences that may run
    - state_snapshots: of these states, for the prefix cache
    - lora_slots: for A and B of all adapters in slots, without what is borrowed
    """
    steps = runner.steps
    weights = sum(weight.nbytes for weight in steps.model.parameters())
    cache = sum(kv.k_NPGD.nbytes + kv.v_NPGD.nbytes for kv in set(steps.caches))  # layers may share
    arena = 0 if runner.loras is None else runner.loras.model_manager.arena_bytes
    size = steps.model.group.size
    snapshots = 0 if steps.states is None else steps.states.snapshot_bytes
    states = 0 if steps.states is None else steps.states.num_bytes - snapshots
    held = {"weights": weights, "kv_cache": cache, "states": states, "state_snapshots": snapshots, "lora_slots": arena}
    return {kind: num_bytes * size for kind, num_bytes in held.items()}

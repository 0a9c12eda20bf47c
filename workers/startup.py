"""Builds an Engine, or another rank of its replica, from an EngineConfig: weights, slots, KV cache, recurrent
states, CUDA graphs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.sampling.draw_tokens import warm_up as warm_up_sampling
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import NothingToShare
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineHello, LoRALimits
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionSpec
from lorafleet.workers.attention.flashinfer_memory import flashinfer_bytes
from lorafleet.workers.attention.flashinfer_modules import missing_modules
from lorafleet.workers.attention.module_build import ModuleBuild, ModuleSource
from lorafleet.workers.attention.prompt_tiles import TILE_QUERIES
from lorafleet.workers.attention.select import make_attention, may_use_flashinfer, refusal
from lorafleet.workers.attention.switching_attention import SwitchingAttention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.auto_options import base_dtype, choose_device, kv_dtype, lora_dtype
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import Progress, held_tensors
from lorafleet.workers.device.routed_experts import RoutedExperts
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.engine import Engine
from lorafleet.workers.kv_cache_sizing import (
    allocate_caches,
    allocate_states,
    block_bytes,
    bytes_per_token,
    check_tiers,
    longest_adapted,
    longest_captured,
    size_cache,
)
from lorafleet.workers.kv_events.start_events import start_events
from lorafleet.workers.kv_tiers.allocate_tiers import allocate_tiers
from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.kv_tiers.state_tiers import StateTiers
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.model_loading import fill_model, load_model
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.fixed_order import check_adapter, check_fixed_order
from lorafleet.workers.models.generic.architecture import with_implementation
from lorafleet.workers.models.generic.generic_loading import find_shard, load_generic
from lorafleet.workers.pool.build_pool import build_pool
from lorafleet.workers.pool.pool_start import PoolStart, start_pool
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.schedule.state_snapshots import StateSnapshots
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.schedule.step_tiles import StepTiles
from lorafleet.workers.sleep.rank_memory import RankMemory
from lorafleet.workers.sleep.replica_memory import ReplicaMemory
from lorafleet.workers.sleep.weights_gate import WeightsGate
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights, MovedWeights
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.speculation.draft_heads import check_division
from lorafleet.workers.speculation.draft_model import DraftModel, load_drafting_model
from lorafleet.workers.speculation.draft_steps import DraftSteps
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.speculation.start_speculation import start_speculation
from lorafleet.workers.step.decode_capture import DecodeCapture
from lorafleet.workers.step.decode_graphs import FIRST_SIZES, DecodeGraphs, graph_sizes
from lorafleet.workers.step.drafted_sizes import DraftedSizes
from lorafleet.workers.step.late_work import LateWork
from lorafleet.workers.step.prefill_graphs import PrefillGraphs, graph_token_counts
from lorafleet.workers.step.reserved_memory import reserve_logits
from lorafleet.workers.step.runner import ModelRunner
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import TierContent
from lorafleet.workers.tp.shard import Shard
from lorafleet.workers.tp.sharding_choice import with_sharding_of

log = logging.getLogger(__name__)

EXTRA_MARGIN_BYTES = 512 << 20  # free GPU memory that adapters' extras leave to the libraries


@dataclass(frozen=True, slots=True)
class Rank:
    """The objects that every rank of a replica builds alike, for its part of the model, of the KV cache and of the
    adapters."""

    steps: StepRunner
    slots: LoRAModelManager | None  # None if there are no adapters
    loader: AdapterLoader | None  # None if there are no adapters
    tiers: dict[TierContent, RankTiers]  # empty if KV blocks that leave the GPU are lost
    memory: RankMemory
    num_blocks: int  # KV blocks, the same on all ranks
    max_model_len: int
    pool: PoolStart | None  # None if adapters and KV blocks have fixed shares of memory
    drafter: ModelDrafter | None = None  # On rank 0, if a model drafts.
    draft_steps: DraftSteps | None = None  # Runs this rank's part of that model; None if it has none.

    @property
    def least_blocks(self) -> int:
        """KV blocks that sequences have even if adapters borrow all that they may."""
        return self.num_blocks if self.pool is None else self.pool.least_blocks(self.num_blocks)


def build_rank(
    config: EngineConfig,
    rank: int = 0,
    addresses: RankAddresses | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
    find_neighbors: FindNeighbors | None = None,
    others: OtherRanks | None = None,
) -> Rank:
    """Builds one rank of a replica. Raises ConfigError (UnsupportedModel among them) that names what does not fit.

    Args:
        addresses: None for a rank alone.
        check: Called while waiting for the other ranks; raises if one has failed.
        find_neighbors: Finds other nodes that have an adapter; None asks the adapters' sources only.
        others: On rank 0, the other ranks.
    """
    config = with_implementation(config)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    base = _build_model(config, rank, addresses, progress, check)
    spec = _attention_spec(config, base)
    draft = load_drafting_model(config, base.model, base.device)
    why_not = _why_memory_is_fixed(config, spec, draft)
    pool = start_pool(config.lora, base.model.group.size, base.device, block_bytes(spec), why_not)
    slots, loader = None, None  # They come before the KV cache, which gets the memory that is left.
    if config.lora is not None:
        drafts = None if draft is None else draft.loader
        slots, loader = _build_adapters(config, config.lora, base, pool, find_neighbors, drafts)
    sized = None if pool is None else _try_to_share(config, base, spec, slots, pool, draft)
    if pool is not None and sized is None:
        assert config.lora is not None and slots is not None
        pool = None
        gc.collect()  # What the exception has held: states, and the pool's memory.
        slots.leave_pool(config.lora)
    steps, num_blocks, max_model_len = sized or _build_steps(config, base, spec, slots, None, draft)
    drafter = draft_steps = head_steps = None
    if draft is not None:
        draft_steps = draft.steps(num_blocks, max_model_len, others)
        head_steps = None if draft_steps.rows is None else draft_steps.runner
        if rank == 0:
            drafter = draft.drafter(draft_steps, num_blocks, max_model_len, base.model.config.vocab_size)
    tiers = allocate_tiers(config, steps.caches, steps.states, base.model.group, base.device)
    if slots is not None:
        _bound_extra_memory(slots.extra_memory, base.model.group, base.device)
    name = Path(config.model).name
    log.info("rank %d is ready: %s on %s in %s, context %d", rank, name, base.device, base.dtype, max_model_len)
    memory = RankMemory(steps, slots, list(tiers.values()), base.gate, base.reload, pool, head_steps)
    return Rank(steps, slots, loader, tiers, memory, num_blocks, max_model_len, pool, drafter, draft_steps)


def _why_memory_is_fixed(config: EngineConfig, spec: AttentionSpec, draft: DraftModel | None) -> str | None:
    """Returns why adapters and KV blocks do not share memory by default, or None if they do where they can."""
    if draft is not None:
        return "a model drafts"
    if may_use_flashinfer(spec, config.attention_backend, has_fixed_order=config.batch_invariant):
        return "they have not been shared with FlashInfer's attention on a GPU"
    return None


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """The base model's part of one rank."""

    model: EngineModel
    layout: BaseLayout
    held: Mapping[str, Callable[[], Tensor]]  # this rank's part of every tensor, by the checkpoint's name
    reload: Callable[[], None] | None  # fills the model from the checkpoint again, if that is possible
    dtype: torch.dtype
    device: torch.device
    gate: WeightsGate = field(default_factory=WeightsGate)


def _build_model(
    config: EngineConfig,
    rank: int,
    addresses: RankAddresses | None,
    progress: Progress | None,
    check: Callable[[], None],
) -> _LoadedModel:
    """Joins the other ranks and loads this rank's part of the model."""
    device = choose_device(config)
    check_fixed_order(config, device)
    folder = Path(config.model)

    def join() -> TPGroup:
        assert (addresses is None) == (config.tensor_parallel_size == 1)
        return TPGroup() if addresses is None else TPGroup.join(rank, addresses.size, addresses.meeting, device, check)

    if config.model_impl == "transformers":
        shard = find_shard(config, rank)  # raises before the other ranks are waited for
        generic = load_generic(config, shard, join(), device)
        dtype = generic.embed_tokens.weight.dtype
        return _LoadedModel(generic, generic.config.layout(), generic.held_tensors(), None, dtype, device)
    model_config = read_model_config(folder)
    model_config = replace(model_config, quantization=resolved(model_config.quantization, config.quantization))
    dtype = base_dtype(config, model_config, folder)
    Shard.of(model_config, rank, config.tensor_parallel_size)  # raises before the other ranks are waited for
    check_division(config, model_config)  # as above
    model = load_model(config, model_config, join(), dtype, device, progress)
    reload = partial(fill_model, config, model)
    return _LoadedModel(model, BaseLayout.of(model_config), held_tensors(model), reload, dtype, device)


def _attention_spec(config: EngineConfig, base: _LoadedModel) -> AttentionSpec:
    cached_in = kv_dtype(config, base.dtype, base.device)
    model = base.model
    return attention_spec(model.shard.local, config.block_size, base.dtype, cached_in, base.device, model.sinks())


def _build_adapters(
    config: EngineConfig,
    lora: LoRAConfig,
    base: _LoadedModel,
    pool: PoolStart | None,
    find_neighbors: FindNeighbors | None,
    drafts: AdapterLoader | None,
) -> tuple[LoRAModelManager, AdapterLoader]:
    """Allocates the slots, and starts the loader that reads adapters for them."""
    dtype = lora_dtype(lora, base.dtype, base.device)
    lora = with_sharding_of(lora, base.model.group, base.device, config.max_num_seqs)
    slots = LoRAModelManager(base.model, lora, dtype, base.device, pool)
    described = Base(base.layout, _base_weights(config, base), Path(config.model).name)
    check = check_adapter if config.batch_invariant else None
    store = AdapterStore(config.sources, find_neighbors)
    return slots, AdapterLoader(described, lora, slots, dtype, base.device, store, check=check, drafts=drafts)


def _try_to_share(
    config: EngineConfig,
    base: _LoadedModel,
    spec: AttentionSpec,
    slots: LoRAModelManager | None,
    pool: PoolStart,
    draft: DraftModel | None,
) -> tuple[StepRunner, int, int] | None:
    """Builds the steps as _build_steps() does. Returns None if there is nothing to share, and the user has not asked
    for it."""
    try:
        return _build_steps(config, base, spec, slots, pool, draft)
    except NothingToShare as error:
        if config.lora is None or config.lora.share_lora_memory:
            raise
        log.info("adapters and KV blocks have fixed shares of memory: %s", error.message)
        return None


def _build_steps(
    config: EngineConfig,
    base: _LoadedModel,
    spec: AttentionSpec,
    slots: LoRAModelManager | None,
    pool: PoolStart | None,
    draft: DraftModel | None,
) -> tuple[StepRunner, int, int]:
    """Allocates the KV cache and captures the graphs. Returns the runner, the number of KV blocks and the longest
    sequence served. Raises NothingToShare if the pool has no KV blocks that adapters could borrow."""
    model, device = base.model, base.device
    check_tiers(config, model.config)
    states = allocate_states(config, model, base.dtype, device)
    modules = _late_modules(config, spec, model.group.size)
    starting = replace(config, attention_backend="triton") if modules else config

    def late_bytes(most_tokens: int) -> int:
        of_attention = _late_bytes(config, model, spec, most_tokens) if modules else 0
        of_drafts = 0 if draft is None else draft.late_bytes(most_tokens, bytes_per_token(spec))
        return of_attention + of_drafts + (0 if pool is None else pool.late_bytes)

    num_blocks, max_model_len = size_cache(starting, model, spec, states, late_bytes)
    memory = None
    if pool is not None:
        kept = -(-max(max_model_len, config.max_model_len or 0) // config.block_size)
        exact = config.kv_cache_tokens is not None
        num_blocks = pool.divide(num_blocks, kept, rounds_up=exact)
        memory = None if pool.groups is None else pool.groups.tensors
    # the last block is for captured steps' padding
    caches = allocate_caches(config, model.config, spec, num_blocks + 1, memory)
    attention: AttentionBackend = make_attention(
        spec, caches, starting.attention_backend, has_fixed_order=config.batch_invariant
    )
    switching = None
    if modules:
        attention = switching = SwitchingAttention(attention, lambda: make_attention(spec, caches))
    if draft is not None:
        draft.attach(model, num_blocks + 1)  # before the graphs, which write features
    routed = None  # comes before the graphs, which write into it
    if config.enable_return_routed_experts:
        most_tokens = max(config.max_num_batched_tokens, *graph_sizes(config.max_num_seqs))
        routed = RoutedExperts(model, most_tokens, device)
    trash_slot = num_blocks * config.block_size
    inputs = StepInputs(config.most_sampled, config.max_num_batched_tokens, trash_slot, device)
    decode_graphs = prefill_graphs = None
    if device.type == "cuda" and not config.enforce_eager:
        sizes = graph_sizes(config.max_num_seqs)
        least_blocks = num_blocks if pool is None else pool.least_blocks(num_blocks)
        longest = longest_captured(config, model.config, max_model_len, least_blocks)
        capture = DecodeCapture(model, caches, states, attention, inputs, num_blocks, slots, longest, device)
        first_sizes = FIRST_SIZES if model.group.size == 1 else sizes
        drafted = None
        if config.speculative_config is not None:
            first_seqs = FIRST_SIZES if model.group.size == 1 else None
            most_sampled = config.most_sampled
            if states is not None:
                most_sampled = min(most_sampled, config.max_num_seqs + len(states.draft_slots))
            drafted = DraftedSizes.of(
                config.speculative_config.most_rows, config.max_num_seqs, most_sampled, first_seqs
            )
        decode_graphs = DecodeGraphs(
            capture, sizes, first_sizes, slots, longest, bool(model.mixtures()), drafted=drafted
        )
        if states is None:  # what recurrent layers launch depends on the step's mix of lengths
            counts = graph_token_counts(config.max_num_batched_tokens)
            prefill_graphs = PrefillGraphs(
                model, caches, attention, spec, inputs, counts, slots, has_fixed_tiles=config.batch_invariant
            )
    reserve = partial(reserve_logits, model, config.most_sampled, device)
    late = LateWork(switching, decode_graphs, reserve)
    steps = StepRunner(
        model,
        attention,
        caches,
        states,
        inputs,
        device,
        slots,
        decode_graphs,
        prefill_graphs,
        late,
        routed,
        config.batch_invariant,
    )
    reserve()
    if device.type == "cuda" and config.lora is not None:
        started = time.monotonic()
        steps.warm_up(config.max_num_batched_tokens, config.lora.max_lora_rank)
        log.info("warmed up the LoRA kernels of steps without CUDA graphs in %.1f s", time.monotonic() - started)
    if switching is not None:  # at the end, so that the compilers do not delay the start
        switching.start(ModuleBuild(modules))
    return steps, num_blocks, max_model_len


def _late_modules(config: EngineConfig, spec: AttentionSpec, num_ranks: int) -> list[ModuleSource]:
    """Returns the modules that are compiled beside the first steps, which Triton's attention serves.

    There are none if the attention is requested by name, if its bits must not change, or if several ranks would have to
    change it in the same step.
    """
    if (
        config.attention_backend != "auto"
        or config.batch_invariant
        or num_ranks > 1
        or refusal("triton", spec) is not None
    ):
        return []
    return missing_modules(spec)


def _late_bytes(config: EngineConfig, model: EngineModel, spec: AttentionSpec, most_tokens: int) -> int:
    """Returns the bytes of the attention that takes over later, beside a KV cache of so many tokens or less."""
    longest = min(config.max_model_len or model.config.context_limit, most_tokens)
    longest = longest_captured(config, model.config, longest, most_tokens // config.block_size)
    sizes = [] if config.enforce_eager else graph_sizes(config.max_num_seqs)
    return flashinfer_bytes(spec, torch.cuda.get_device_capability(spec.device), sizes, longest)


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    wake: Callable[[], None] = lambda: None,
    addresses: RankAddresses | None = None,
    check: Callable[[], None] = lambda: None,
    find_neighbors: FindNeighbors | None = None,
) -> Engine:
    """Builds the engine on rank 0. The other ranks must be started beside it, at `addresses`. Raises as build_rank
    does.

    Args:
        wake: Called from other threads when the engine has something to do, see WorkerLoRAManager.
        check: As in build_rank, for what the caller knows of the other ranks beyond what they report themselves.
        find_neighbors: As in build_rank.
    """
    config = with_implementation(config)
    others = None if addresses is None else OtherRanks(addresses, wake)

    def check_others() -> None:
        if others is not None:
            others.check()
        check()

    try:
        rank = build_rank(config, 0, addresses, progress, check_others, find_neighbors, others)
    except BaseException:
        if others is not None:
            others.close()
        raise
    steps, model_config = rank.steps, rank.steps.model.config
    is_recurrent, snapshots = steps.states is not None, None
    if steps.states is not None and steps.states.snapshot_slots:
        snapshots = StateSnapshots(steps.states.snapshot_slots)
    if is_recurrent and config.enable_prefix_caching and snapshots is None:
        log.info("the prefix cache is off: state_snapshots=0, and %s has recurrent layers", model_config.architecture)
    caches_prefixes = config.enable_prefix_caching and (snapshots is not None or not is_recurrent)
    kv = KVCacheManager(rank.num_blocks, config.block_size, caches_prefixes)
    orders = {content: TierOrders(own, others, wake) for content, own in rank.tiers.items()}
    tiers = state_tiers = None
    if snapshots is not None and "states" in orders:
        state_tiers = StateTiers(snapshots, orders["states"], *rank.tiers["states"].num_slots)
    if "blocks" in orders:
        tiers = KVTiers(kv, orders["blocks"], *rank.tiers["blocks"].num_slots, states=state_tiers)
    budget = StepBudget(_step_limits(config, steps.device, is_recurrent))
    loras = None
    if config.lora is not None and rank.slots is not None and rank.loader is not None:
        sharing = None if rank.pool is None else build_pool(rank.pool, kv, rank.slots.policy, budget, tiers)
        drafts = None if rank.drafter is None else rank.drafter.slots
        loras = WorkerLoRAManager(config.lora, rank.slots, rank.loader, others, wake, sharing, drafts)
    scheduler = Scheduler(
        kv,
        loras,
        model_config.rope,
        config.max_num_seqs,
        budget,
        None if steps.states is None else StateSlots(config.max_num_seqs, snapshots, steps.states.draft_slots),
        tiers,
        start_speculation(config, model_config, budget, rank.drafter),
    )
    start_events(config, scheduler)
    if steps.device.type == "cuda":
        warm_up_sampling(model_config.vocab_size, steps.model.embed_tokens.weight.dtype, steps.device)
    memory = ReplicaMemory(rank.memory, others, wake)
    runner = ModelRunner(steps, memory, loras, config.block_size, config.logprobs_mode, others)
    overlap = steps.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    hello = EngineHello(
        vocab_size=model_config.vocab_size,
        max_model_len=rank.max_model_len,
        kv_cache_tokens=rank.num_blocks * config.block_size,
        eos_token_ids=list(model_config.eos_token_ids),
        hidden_size=model_config.hidden_size,
        falls_back_to_base=config.on_lora_load_failure == "base",
        rope_positions=model_config.rope_positions,
        max_adapter_len=longest_adapted(config, rank.least_blocks),
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=str(steps.model.embed_tokens.weight.dtype).removeprefix("torch."),
        lora=None if config.lora is None else _lora_limits(config.lora),
        routed=None if steps.routed is None else steps.routed.shape,
        logprobs_mode=config.logprobs_mode,
        device=_device_name(steps.device),
    )
    return Engine(
        runner,
        scheduler,
        StructuredDecoding(config.most_sampled, wake, finds_forced=config.speculative_config is not None),
        hello,
        config.on_lora_load_failure,
        config.seed,
        overlap,
        config.max_queued_requests,
        config.max_queued_tokens,
    )


def _device_name(device: torch.device) -> str:
    """Returns the GPU's UUID as nvidia-smi shows it, or "cpu"."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"


def _lora_limits(config: LoRAConfig) -> LoRALimits:
    return LoRALimits(config.max_lora_rank, config.max_loras, config.gpu_loras, config.cpu_loras, config.lora_dtype)


def _step_limits(config: EngineConfig, device: torch.device, is_recurrent: bool) -> StepLimits:
    has_graphs = device.type == "cuda" and not config.enforce_eager and not is_recurrent  # for steps with prompts
    return StepLimits(
        config.max_num_batched_tokens,
        config.max_num_mixed_tokens,
        config.max_gap_ms / 1e3,
        config.ttft_target_ms / 1e3,
        StepTiles(
            graph_token_counts(config.max_num_batched_tokens) if has_graphs else (),
            TILE_QUERIES if device.type == "cuda" else 1,
        ),
    )


def _bound_extra_memory(extra: ExtraMemory, group: TPGroup, device: torch.device) -> None:
    """Limits the extras of adapters to the memory that is free beside the KV cache, so that it is there when they
    come. The limit is the same on all ranks."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    limit = group.least(max(0, min(extra.limit, free - EXTRA_MARGIN_BYTES)), device)
    if limit < extra.limit:
        log.warning(
            "only %.2f GiB are left for adapters' vectors and tables, less than lora.extra_memory_gib=%.2f; lower "
            "gpu_memory_utilization to leave more",
            limit / 2**30,
            extra.limit / 2**30,
        )
    extra.limit = limit


def _base_weights(config: EngineConfig, base: _LoadedModel) -> BaseWeights | None:
    """Returns the base's weights, or None if no rank has them whole and there is no file either."""
    model = base.model
    if model.group.size == 1:
        return ModelWeights(model, base.held, base.gate)
    if config.load_format == "dummy":
        return None
    tied, quantization = model.config.tie_word_embeddings, model.config.quantization
    experts = model.config.experts
    routers = frozenset[str]() if experts is None else experts.router_modules
    # Engine names begin with "model." where a decoder of transformers has another name of its own too.
    names = base.layout.names if base.layout.has_root else ModuleNames(root="")
    files = FileWeights(Path(config.model), base.dtype, tied, quantization, names, routers)
    return MovedWeights(files, base.device, base.gate) if base.device.type == "cuda" else files

"""Builds an Engine from an EngineConfig, around rank 0 of its replica."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lorafleet.kernels.sampling.draw_tokens import warm_up as warm_up_sampling
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineHello, LoRALimits
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.workers.attention.prompt_tiles import TILE_QUERIES
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.bases.weights import Progress
from lorafleet.workers.device.draft_verification import warm_up_verification
from lorafleet.workers.engine import Engine
from lorafleet.workers.kv_cache_sizing import (
    longest_adapted,
)
from lorafleet.workers.kv_events.start_events import start_events
from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
from lorafleet.workers.kv_tiers.state_tiers import StateTiers
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.models.generic.architecture import with_implementation
from lorafleet.workers.pool.build_pool import build_pool
from lorafleet.workers.rank_startup import build_rank
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.schedule.state_snapshots import StateSnapshots
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.schedule.step_tiles import StepTiles
from lorafleet.workers.sleep.replica_memory import ReplicaMemory
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.speculation.start_speculation import start_speculation
from lorafleet.workers.step.prefill_graphs import graph_token_counts
from lorafleet.workers.step.runner import ModelRunner
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.tp.link import OtherRanks

log = logging.getLogger(__name__)


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
    base = BaseIdentity(rank.base_digest)
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
        loras = WorkerLoRAManager(config.lora, rank.slots, rank.loader, others, wake, sharing, drafts, base)
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
        if config.speculative_config is not None:
            warm_up_verification(steps.device)
    memory = ReplicaMemory(rank.memory, base, others, wake)
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
        can_generate=model_config.has_head,
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

"""Builds an Engine, or another rank of its replica, from an EngineConfig: weights, slots, KV cache, CUDA graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorafleet.kernels.sampling.draw_tokens import warm_up as warm_up_sampling
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineHello
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionSpec
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.auto_options import base_dtype, choose_device, kv_dtype, lora_dtype
from lorafleet.workers.bases.checkpoint import ModelConfig, read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import Progress, fill_randomly, load_weights
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.engine import Engine
from lorafleet.workers.kv_cache_sizing import allocate_caches, size_cache
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights, MovedWeights
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.decode_graphs import DecodeGraphs, graph_sizes
from lorafleet.workers.step.prefill_graphs import PrefillGraphs, graph_token_counts
from lorafleet.workers.step.runner import ModelRunner
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.shard import Shard

log = logging.getLogger(__name__)

EXTRA_MARGIN_BYTES = 512 << 20  # free GPU memory that adapters' extras leave to the libraries


@dataclass(frozen=True, slots=True)
class Rank:
    """The objects that every rank of a replica builds alike, for its part of the model, of the KV cache and of the
    adapters."""

    steps: StepRunner
    slots: LoRAModelManager | None  # None if there are no adapters
    loader: AdapterLoader | None  # None if there are no adapters
    num_blocks: int  # KV blocks, the same on all ranks
    max_model_len: int


def build_rank(
    config: EngineConfig,
    rank: int = 0,
    addresses: RankAddresses | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
) -> Rank:
    """Builds one rank of a replica. Raises ConfigError (UnsupportedModel among them) that names what does not fit.

    Args:
        addresses: None for a rank alone.
        check: Called while waiting for the other ranks; raises if one has failed.
    """
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    base = _build_model(config, rank, addresses, progress, check)
    # Slots come before the KV cache, which gets the memory that is left.
    slots, loader = (None, None) if config.lora is None else _build_adapters(config, config.lora, base)
    steps, num_blocks, max_model_len = _build_steps(config, base, slots)
    if slots is not None:
        _bound_extra_memory(slots.extra_memory, base.model.group, base.device)
    name = Path(config.model).name
    log.info("rank %d is ready: %s on %s in %s, context %d", rank, name, base.device, base.dtype, max_model_len)
    return Rank(steps, slots, loader, num_blocks, max_model_len)


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """The base model's part of one rank."""

    model: DecoderModel
    dtype: torch.dtype
    device: torch.device


def _build_model(
    config: EngineConfig,
    rank: int,
    addresses: RankAddresses | None,
    progress: Progress | None,
    check: Callable[[], None],
) -> _LoadedModel:
    """Joins the other ranks and loads this rank's part of the model."""
    device = choose_device(config)
    folder = Path(config.model)
    model_config = read_model_config(folder)
    model_config = replace(model_config, quantization=resolved(model_config.quantization, config.quantization))
    dtype = base_dtype(config, model_config, folder)
    Shard.of(model_config, rank, config.tensor_parallel_size)  # raises before the other ranks are waited for
    assert (addresses is None) == (config.tensor_parallel_size == 1)
    group = TPGroup() if addresses is None else TPGroup.join(rank, addresses.size, addresses.meeting, device, check)
    return _LoadedModel(_load_model(config, model_config, group, dtype, device, progress), dtype, device)


def _build_adapters(
    config: EngineConfig, lora: LoRAConfig, base: _LoadedModel
) -> tuple[LoRAModelManager, AdapterLoader]:
    """Allocates the slots, and starts the loader that reads adapters for them."""
    dtype = lora_dtype(lora, base.dtype, base.device)
    slots = LoRAModelManager(base.model, lora, dtype, base.device)
    weights = _base_weights(config, base.model, base.dtype)
    described = Base(BaseLayout.of(base.model.config), weights, Path(config.model).name)
    return slots, AdapterLoader(described, lora, slots, dtype, base.device, AdapterStore(config.sources))


def _build_steps(
    config: EngineConfig, base: _LoadedModel, slots: LoRAModelManager | None
) -> tuple[StepRunner, int, int]:
    """Allocates the KV cache and captures the graphs. Returns the runner, the number of KV blocks and the longest
    sequence served."""
    model, device, spec = base.model, base.device, _attention_spec(config, base)
    num_blocks, max_model_len = size_cache(config, model, spec)
    caches = allocate_caches(config, model.config, spec, num_blocks + 1)  # the last is for captured steps' padding
    attention = make_attention(spec, caches, config.attention_backend)
    inputs = StepInputs(config.max_num_seqs, config.max_num_batched_tokens, num_blocks * config.block_size, device)
    decode_graphs = prefill_graphs = None
    if device.type == "cuda" and not config.enforce_eager:
        sizes = graph_sizes(config.max_num_seqs)
        decode_graphs = DecodeGraphs(model, caches, attention, inputs, sizes, num_blocks, slots, max_model_len, device)
        counts = graph_token_counts(config.max_num_batched_tokens)
        prefill_graphs = PrefillGraphs(model, caches, attention, spec, inputs, counts, slots)
    steps = StepRunner(model, attention, caches, inputs, device, slots, decode_graphs, prefill_graphs)
    if device.type == "cuda" and config.lora is not None:
        started = time.monotonic()
        steps.warm_up(config.max_num_batched_tokens, config.lora.max_lora_rank)
        log.info("warmed up the LoRA kernels of steps without CUDA graphs in %.1f s", time.monotonic() - started)
    return steps, num_blocks, max_model_len


def _attention_spec(config: EngineConfig, base: _LoadedModel) -> AttentionSpec:
    model = base.model
    return AttentionSpec(
        num_heads=model.shard.local.num_heads,
        num_kv_heads=model.shard.local.num_kv_heads,
        head_dim=model.config.head_dim,
        scale=model.config.attention_scale,
        sliding_windows=model.config.sliding_windows,
        block_size=config.block_size,
        dtype=base.dtype,
        kv_dtype=kv_dtype(config, base.dtype, base.device),
        device=base.device,
        softcap=model.config.attention_softcap,
    )


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    wake: Callable[[], None] = lambda: None,
    addresses: RankAddresses | None = None,
    check: Callable[[], None] = lambda: None,
) -> Engine:
    """Builds the engine on rank 0. The other ranks must be started beside it, at `addresses`. Raises as build_rank
    does.

    Args:
        wake: Called from other threads when the engine has something to do, see WorkerLoRAManager.
        check: As in build_rank, for what the caller knows of the other ranks beyond what they report themselves.
    """
    others = None if addresses is None else OtherRanks(addresses, wake)

    def check_others() -> None:
        if others is not None:
            others.check()
        check()

    try:
        rank = build_rank(config, 0, addresses, progress, check_others)
    except BaseException:
        if others is not None:
            others.close()
        raise
    steps, model_config = rank.steps, rank.steps.model.config
    loras = None
    if config.lora is not None and rank.slots is not None and rank.loader is not None:
        loras = WorkerLoRAManager(config.lora, rank.slots, rank.loader, others, wake)
    scheduler = Scheduler(
        KVCacheManager(rank.num_blocks, config.block_size, config.enable_prefix_caching),
        loras,
        model_config.rope,
        config.max_num_seqs,
        StepBudget(_step_limits(config, steps.device)),
    )
    if steps.device.type == "cuda":
        warm_up_sampling(model_config.vocab_size, steps.model.embed_tokens.weight.dtype, steps.device)
    runner = ModelRunner(steps, loras, config.block_size, others)
    overlap = steps.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    hello = EngineHello(
        vocab_size=model_config.vocab_size,
        max_model_len=rank.max_model_len,
        kv_cache_tokens=rank.num_blocks * config.block_size,
        eos_token_ids=list(model_config.eos_token_ids),
        hidden_size=model_config.hidden_size,
        falls_back_to_base=config.on_lora_load_failure == "base",
    )
    return Engine(
        runner,
        scheduler,
        StructuredDecoding(config.max_num_seqs, wake),
        hello,
        config.on_lora_load_failure,
        config.seed,
        overlap,
        config.max_queued_requests,
        config.max_queued_tokens,
    )


def _step_limits(config: EngineConfig, device: torch.device) -> StepLimits:
    has_graphs = device.type == "cuda" and not config.enforce_eager
    return StepLimits(
        config.max_num_batched_tokens,
        config.max_num_mixed_tokens,
        config.max_gap_ms / 1e3,
        config.ttft_target_ms / 1e3,
        graph_token_counts(config.max_num_batched_tokens) if has_graphs else (),
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


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    group: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> DecoderModel:
    started = time.monotonic()
    model = DecoderModel(model_config, group, dtype, device)
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_randomly(model)
        else:
            load_weights(model, Path(config.model), progress)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    quantization = "" if model_config.quantization is None else f", linear layers in {model_config.quantization.method}"
    log.info("loaded %.2f GiB of weights in %.1f s%s", size / 2**30, time.monotonic() - started, quantization)
    return model


def _base_weights(config: EngineConfig, model: DecoderModel, dtype: torch.dtype) -> BaseWeights | None:
    """Returns the base's weights, or None if no rank has them whole and there is no file either."""
    if model.group.size == 1:
        return ModelWeights(model)
    if config.load_format == "dummy":
        return None
    files = FileWeights(Path(config.model), dtype, model.config.tie_word_embeddings, model.config.quantization)
    device = model.norm.weight.device
    return MovedWeights(files, device) if device.type == "cuda" else files

"""Builds an Engine, or another rank of its replica, from an EngineConfig: device, dtype, weights, slots, KV cache.
Every choice left to "auto" is made here and logged in one line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineHello
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.bases.checkpoint import DTYPES, ModelConfig, read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.stored_tensors import stored_dtype
from lorafleet.workers.bases.weights import Progress, fill_randomly, load_weights, read_kv_scales
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights, MovedWeights
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.decode_graphs import DecodeGraphs, graph_sizes
from lorafleet.workers.step.planner import SCORED_ROWS
from lorafleet.workers.step.prefill_graphs import PrefillGraphs, graph_token_counts
from lorafleet.workers.step.runner import ModelRunner
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.shard import Shard

log = logging.getLogger(__name__)

CPU_CACHE_TOKENS = 65536
CPU_CACHE_BYTES = 1 << 30
EXTRA_MARGIN_BYTES = 512 << 20  # free GPU memory that adapters' extras leave to the libraries
FP8_CAPABILITY = (8, 9)  # the first compute capability whose Triton kernels convert to and from e4m3


@dataclass(frozen=True, slots=True)
class Rank:
    """The objects that every rank of a replica builds alike, for its part of the model, of the KV cache and of the
    adapters."""

    group: TPGroup
    steps: StepRunner
    model_config: ModelConfig
    device: torch.device
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
    model, device, name = base.model, base.device, Path(config.model).name
    if slots is not None:
        _bound_extra_memory(slots.extra_memory, model.group, device)
    log.info("rank %d ready: %s on %s in %s, context %d", rank, name, device, base.dtype, max_model_len)
    return Rank(model.group, steps, model.config, device, slots, loader, num_blocks, max_model_len)


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
    device = _device(config)
    folder = Path(config.model)
    model_config = read_model_config(folder)
    model_config = replace(model_config, quantization=resolved(model_config.quantization, config.quantization))
    dtype = _dtype(config, model_config, folder)
    Shard.of(model_config, rank, config.tensor_parallel_size)  # raises before the other ranks are waited for
    assert (addresses is None) == (config.tensor_parallel_size == 1)
    group = TPGroup() if addresses is None else TPGroup.join(rank, addresses.size, addresses.meeting, device, check)
    return _LoadedModel(_load_model(config, model_config, group, dtype, device, progress), dtype, device)


def _build_adapters(
    config: EngineConfig, lora: LoRAConfig, base: _LoadedModel
) -> tuple[LoRAModelManager, AdapterLoader]:
    """Allocates the slots, and starts the loader that reads adapters for them."""
    dtype = _lora_dtype(lora, base.dtype, base.device)
    slots = LoRAModelManager(base.model, lora, dtype, base.device)
    weights = _base_weights(config, base.model, base.dtype)
    described = Base(BaseLayout.of(base.model.config), weights, Path(config.model).name)
    return slots, AdapterLoader(described, lora, slots, dtype, base.device, AdapterStore(config.sources))


def _build_steps(
    config: EngineConfig, base: _LoadedModel, slots: LoRAModelManager | None
) -> tuple[StepRunner, int, int]:
    """Allocates the KV cache and captures the graphs. Returns the runner, the number of KV blocks and the longest
    sequence served."""
    model, device, model_config = base.model, base.device, base.model.config
    spec = AttentionSpec(
        num_heads=model.shard.local.num_heads,
        num_kv_heads=model.shard.local.num_kv_heads,
        head_dim=model_config.head_dim,
        scale=model_config.attention_scale,
        sliding_windows=model_config.sliding_windows,
        block_size=config.block_size,
        dtype=base.dtype,
        kv_dtype=_kv_dtype(config, base.dtype, device),
        device=device,
        softcap=model_config.attention_softcap,
    )
    num_blocks, max_model_len = _size_cache(config, model, spec)
    scales = _kv_scales(config, model_config, spec)
    caches = _allocate(spec, num_blocks + 1, scales)  # the last block is for the padding of captured steps
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
        log.info("adapters in steps without graphs: warmed up in %.1f s", time.monotonic() - started)
    return steps, num_blocks, max_model_len


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
    loras = None
    if config.lora is not None and rank.slots is not None and rank.loader is not None:
        loras = WorkerLoRAManager(config.lora, rank.slots, rank.loader, others, wake)
    scheduler = Scheduler(
        KVCacheManager(rank.num_blocks, config.block_size, config.enable_prefix_caching),
        loras,
        rank.model_config.rope,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_num_mixed_tokens,
    )
    runner = ModelRunner(rank.steps, loras, config.block_size, others)
    overlap = rank.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    hello = EngineHello(
        vocab_size=rank.model_config.vocab_size,
        max_model_len=rank.max_model_len,
        kv_cache_tokens=rank.num_blocks * config.block_size,
        eos_token_ids=list(rank.model_config.eos_token_ids),
        hidden_size=rank.model_config.hidden_size,
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


def _bound_extra_memory(extra: ExtraMemory, group: TPGroup, device: torch.device) -> None:
    """Limits the extras of adapters to the memory that is free beside the KV cache, so that it is there when they
    come. The limit is the same on all ranks."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    limit = group.least(max(0, min(extra.limit, free - EXTRA_MARGIN_BYTES)), device)
    if limit < extra.limit:
        log.warning(
            "%.2f GiB are left for adapters' vectors and tables, less than lora.extra_memory_gib=%.2f: a lower "
            "gpu_memory_utilization leaves more",
            limit / 2**30,
            extra.limit / 2**30,
        )
    extra.limit = limit


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device=cuda, but torch sees no GPU. Install a CUDA build of torch, or use cpu.", "device")
    use_gpu = available if config.device == "auto" else config.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def _dtype(config: EngineConfig, model: ModelConfig, folder: Path) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    dtype = model.dtype or (torch.float32 if config.load_format == "dummy" else stored_dtype(folder))
    if dtype not in DTYPES.values():
        raise ConfigError(f"the checkpoint's weights are {dtype}; set dtype to one of {', '.join(DTYPES)}.", "dtype")
    return dtype


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    _check_fp8("kv_cache_dtype", device)
    return FP8


def _lora_dtype(config: LoRAConfig, base: torch.dtype, device: torch.device) -> torch.dtype:
    dtype = config.serving_dtype(base)
    if dtype == FP8:
        _check_fp8("lora_dtype", device)
    return dtype


def _check_fp8(option: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"{option}=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; "
            f"{torch.cuda.get_device_name(device)} is older. Use {option}=auto.",
            option,
        )


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
    quantization = "" if model_config.quantization is None else f", linears in {model_config.quantization.method}"
    log.info("weights: %.2f GiB in %.1f s%s", size / 2**30, time.monotonic() - started, quantization)
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


def _size_cache(config: EngineConfig, model: DecoderModel, spec: AttentionSpec) -> tuple[int, int]:
    """Returns the number of KV blocks, and the longest sequence served. One sequence of that length always fits the
    cache."""
    limit = model.config.context_limit
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is over the model's own limit of {limit} tokens. Lower it.",
            "max_model_len",
        )
    tokens = config.kv_cache_tokens
    if tokens is None:
        fits = _free_bytes(config, model, spec) // _bytes_per_token(spec)
        tokens = fits if spec.device.type == "cuda" else max(min(fits, CPU_CACHE_TOKENS), config.max_model_len or 0)
    num_blocks = model.group.least(tokens // spec.block_size, spec.device)
    tokens = num_blocks * spec.block_size
    if config.max_model_len is not None and tokens < config.max_model_len:
        raise ConfigError(
            f"the KV cache holds {tokens} tokens, less than max_model_len={config.max_model_len}. Lower max_model_len, "
            "or raise gpu_memory_utilization or kv_cache_tokens.",
            "max_model_len",
        )
    if num_blocks < 1:
        raise ConfigError(
            "no memory is left for the KV cache. Raise gpu_memory_utilization, or lower max_loras, max_lora_rank or "
            "max_num_batched_tokens.",
            "kv_cache_tokens",
        )
    max_model_len = config.max_model_len or min(limit, tokens)
    if config.max_model_len is None and tokens < limit:
        log.warning("context cut from the model's %d to %d tokens, the size of the KV cache", limit, tokens)
    log.info("KV cache: %d tokens of %s, %.2f GiB", tokens, spec.kv_dtype, tokens * _bytes_per_token(spec) / 2**30)
    return num_blocks, max_model_len


def _bytes_per_token(spec: AttentionSpec) -> int:
    return 2 * len(spec.sliding_windows) * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize


def _free_bytes(config: EngineConfig, model: DecoderModel, spec: AttentionSpec) -> int:
    if spec.device.type != "cuda":
        return CPU_CACHE_BYTES
    peak = _measure_peak(config, model, spec)
    free, total = torch.cuda.mem_get_info(spec.device)
    held_by_others = total - free - torch.cuda.memory_reserved(spec.device)
    return int(total * config.gpu_memory_utilization) - held_by_others - peak


def _measure_peak(config: EngineConfig, model: DecoderModel, spec: AttentionSpec) -> int:
    """Returns the bytes needed at the peak of the largest step, beside the KV cache.

    torch's peak is measured with as small a KV cache as that step needs. Sampling, graphs and adapters on experts are
    added.
    """
    num_tokens = min(config.max_num_batched_tokens, model.config.context_limit)
    num_blocks = -(-num_tokens // config.block_size)
    caches = _allocate(spec, num_blocks, [(1.0, 1.0)] * len(spec.sliding_windows))
    attention = make_attention(spec, caches, config.attention_backend)
    held = torch.cuda.memory_allocated(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    positions = torch.arange(num_tokens, device=spec.device)
    with torch.inference_mode():
        attention.plan(AttentionBatch([num_tokens], [num_tokens], [list(range(num_blocks))]))
        hidden_TD = model(torch.zeros_like(positions), positions, positions + 1, positions, caches, attention, None)
        logits = model.gather_logits(model.logits(hidden_TD[: config.max_num_seqs])).float()
        del logits, hidden_TD
    torch.cuda.synchronize(spec.device)
    cache_bytes = num_blocks * config.block_size * _bytes_per_token(spec)
    peak = torch.cuda.max_memory_allocated(spec.device) - cache_bytes
    if not config.enforce_eager:  # graphs reserve what their largest step needs
        activations = torch.cuda.max_memory_allocated(spec.device) - held
        peak += activations * max(graph_token_counts(num_tokens)) // num_tokens
    del attention, caches
    torch.cuda.empty_cache()
    # Sampling copies the logits several times (sort, softmax in float64, cumulative sum), and so do prompt logprobs.
    vocab_size, context = model.config.vocab_size, config.max_model_len or model.config.context_limit
    sampling = max(config.max_num_seqs, SCORED_ROWS) * vocab_size * 32
    # Penalties count the tokens of each sequence (token_counts.py). A table needs 1.5 times its size while it grows.
    sampling += config.max_num_seqs * (vocab_size + context) * 6
    return peak + sampling + _expert_delta_bytes(config, model, num_tokens * spec.dtype.itemsize) + (256 << 20)


def _expert_delta_bytes(config: EngineConfig, model: DecoderModel, token_bytes: int) -> int:
    """Returns the bytes of what adapters add to experts, which the measured step does without.

    `token_bytes` is the size of one number for each token.
    """
    experts = model.shard.local.experts
    if experts is None or config.lora is None:
        return 0
    return token_bytes * experts.per_token * max(2 * experts.intermediate_size, model.config.hidden_size)


def _kv_scales(config: EngineConfig, model: ModelConfig, spec: AttentionSpec) -> list[tuple[float, float]]:
    """Returns (k_scale, v_scale) of each layer."""
    none = [(1.0, 1.0)] * model.num_layers
    if config.load_format == "dummy":
        return none
    scales = read_kv_scales(Path(config.model), model.num_layers)
    if scales is None:
        return none
    if spec.kv_dtype != FP8:
        log.info("the checkpoint's KV cache scales are for kv_cache_dtype=fp8; the cache holds %s", spec.kv_dtype)
        return none
    log.info("KV cache scales: the checkpoint's")
    return scales


def _allocate(spec: AttentionSpec, num_blocks: int, scales: list[tuple[float, float]]) -> list[KVCache]:
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return [
        KVCache(
            torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device),
            torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device),
            k_scale,
            v_scale,
        )
        for k_scale, v_scale in scales
    ]

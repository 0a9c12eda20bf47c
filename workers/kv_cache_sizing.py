"""Sizes and allocates the KV cache of one rank. On a GPU it gets the memory that the largest step leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import COMMON_NAMES
from lorafleet.workers.bases.served_config import ServedConfig
from lorafleet.workers.bases.stored_names import AS_WRITTEN
from lorafleet.workers.bases.weights import read_kv_scales
from lorafleet.workers.device.state_cache import StateCache
from lorafleet.workers.kv_tiers.block_movers import STAGING_BYTES
from lorafleet.workers.memory_use import MemoryUse
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.step.planner import SCORED_ROWS
from lorafleet.workers.step.prefill_graphs import graph_token_counts

log = logging.getLogger(__name__)

CPU_CACHE_TOKENS = 65536
CPU_CACHE_BYTES = 1 << 30
LEAST_SNAPSHOTS = 16  # by default
SEQS_PER_SNAPSHOT = 4  # by default
# Sequences with slots for the states behind their drafts. Drafts pay where few sequences run, and states are large.
DRAFTED_SEQS = 8


def size_cache(
    config: EngineConfig,
    model: EngineModel,
    spec: AttentionSpec,
    states: StateCache | None = None,
    late_bytes: Callable[[int], int] = lambda _: 0,
) -> tuple[int, int]:
    """Returns the number of KV blocks, and the longest sequence served. One sequence of that length always fits the
    cache.

    `states` are already allocated, so that the KV cache gets what they leave. `late_bytes` are left free on a GPU, for
    what is allocated after the start. They are computed from the most tokens that the cache may have.
    """
    limit = model.config.context_limit
    check_context(config, limit, model.config.rope_positions)
    tokens, use = config.kv_cache_tokens, None
    if tokens is None:
        free = CPU_CACHE_BYTES
        if spec.device.type == "cuda":
            use = _measure_use(config, model, spec, states)
            free = use.free
        later = late_bytes(cache_tokens(config, spec, free))
        tokens = cache_tokens(config, spec, free - later)
        use = None if use is None else replace(use, later=later)
    num_blocks = model.group.least(tokens // spec.block_size, spec.device)
    tokens = num_blocks * spec.block_size
    try:
        max_model_len = longest_sequence(config, limit, tokens)
    except ConfigError as error:
        least_tokens = max(config.max_model_len or 0, spec.block_size)
        raise error if use is None else use.explained(error, least_tokens * bytes_per_token(spec)) from None
    if config.max_model_len is None and tokens < limit:
        log.warning("reduced max_model_len from the model's %d to %d tokens, the size of the KV cache", limit, tokens)
    log.info("KV cache: %d tokens of %s, %.2f GiB", tokens, spec.kv_dtype, tokens * bytes_per_token(spec) / 2**30)
    return num_blocks, max_model_len


def check_context(config: EngineConfig, limit: int, rope_positions: int) -> None:
    """Raises ConfigError if max_model_len exceeds the limits of the model and of the adapters that are declared to
    exceed it."""
    if config.lora is not None:
        limit = max(limit, int(rope_positions * config.lora.largest_scaling_factor))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is over the model's own limit of {limit} tokens. Lower it.",
            "max_model_len",
        )


def check_tiers(config: EngineConfig, model: ServedConfig) -> None:
    """Raises ConfigError if KV tiers are asked for of a model with recurrent layers that takes no snapshots.

    Keys and values alone are of no use for such a model.
    """
    if config.kv_host_gib and model.states and not snapshots_for(config, model):
        raise ConfigError(
            f"kv_host_gib={config.kv_host_gib} has no use with state_snapshots=0 for a model with recurrent layers. "
            "Leave one of them out.",
            "kv_host_gib",
        )


def longest_adapted(config: EngineConfig, num_blocks: int) -> int:
    """Returns the longest sequence served of an adapter with a context of its own; 0 without adapters."""
    if config.lora is None:
        return 0
    return config.max_model_len or num_blocks * config.block_size


def longest_captured(config: EngineConfig, model: ServedConfig, max_model_len: int, num_blocks: int) -> int:
    """Returns the longest sequence for which CUDA graphs have room: the base's, or the adapters' as declared.

    The room is in each graph, so it is not for a whole KV cache.
    """
    if config.lora is None or config.lora.long_lora_scaling_factors is None:
        return max_model_len
    declared = int(model.rope_positions * config.lora.largest_scaling_factor)
    return max(max_model_len, min(longest_adapted(config, num_blocks), declared))


def cache_tokens(config: EngineConfig, spec: AttentionSpec, free_bytes: int) -> int:
    """Returns the tokens of a KV cache that may take free_bytes, before they are rounded down to whole blocks."""
    fits = free_bytes // bytes_per_token(spec)
    return fits if spec.device.type == "cuda" else max(min(fits, CPU_CACHE_TOKENS), config.max_model_len or 0)


def longest_sequence(config: EngineConfig, limit: int, tokens: int) -> int:
    """Returns the longest sequence that a KV cache of so many tokens serves. Raises ConfigError if the cache is too
    small."""
    if config.max_model_len is not None and tokens < config.max_model_len:
        raise ConfigError(
            f"the KV cache holds {max(0, tokens)} tokens, less than max_model_len={config.max_model_len}. Lower "
            "max_model_len, or raise gpu_memory_utilization or kv_cache_tokens.",
            "max_model_len",
        )
    if tokens < config.block_size:
        raise ConfigError(
            f"no memory is left for the KV cache: a block of it has block_size={config.block_size} tokens. Raise "
            "gpu_memory_utilization, or lower lora_memory_gib, max_loras, max_lora_rank, max_num_batched_tokens, "
            "max_num_seqs or block_size.",
            "kv_cache_tokens",
        )
    return min(config.max_model_len or tokens, limit, tokens)


def bytes_per_token(spec: AttentionSpec) -> int:
    """Returns the bytes of a token's keys and values in all layers. Layers that read another's cache have none."""
    return spec.kv_dtype.itemsize * sum(layer.cached_numbers for layer in spec.layers if layer.cache_layer is None)


def block_bytes(spec: AttentionSpec) -> list[int]:
    """Returns the bytes of a KV block in each tensor of allocate_caches(), in their order."""
    return [
        spec.block_size * layer.num_kv_heads * dim * spec.kv_dtype.itemsize
        for layer in spec.layers
        if layer.cache_layer is None
        for dim in layer.cached_dims
    ]


def _measure_use(config: EngineConfig, model: EngineModel, spec: AttentionSpec, states: StateCache | None) -> MemoryUse:
    """Measures the memory of the GPU by its users, except what is set aside for later."""
    held = torch.cuda.memory_allocated(spec.device)
    peak = _measure_peak(config, model, spec, states)
    free, total = torch.cuda.mem_get_info(spec.device)
    weights = min(held, _weight_bytes(model))
    return MemoryUse(
        total,
        config.gpu_memory_utilization,
        others=total - free - torch.cuda.memory_reserved(spec.device),
        weights=weights,
        slots=held - weights,
        step=peak - held,
    )


def _weight_bytes(model: EngineModel) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def budget_bytes(config: EngineConfig, total_bytes: int) -> int:
    """Returns the bytes of a GPU that the worker and everything else on it may take together."""
    return int(total_bytes * config.gpu_memory_utilization)


def _measure_peak(config: EngineConfig, model: EngineModel, spec: AttentionSpec, states: StateCache | None) -> int:
    """Returns the bytes needed at the peak of the largest step, beside the KV cache and with the states.

    torch's peak is measured with as small a KV cache as that step needs. Sampling, graphs and adapters on experts are
    added.
    """
    num_tokens = largest_step(config, model.config)
    num_blocks = -(-num_tokens // config.block_size)
    caches = _allocate(spec, num_blocks, [(1.0, 1.0)] * len(spec.layers))
    attention = make_attention(spec, caches, config.attention_backend, has_fixed_order=config.batch_invariant)
    held = torch.cuda.memory_allocated(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    positions = torch.arange(num_tokens, device=spec.device)
    with torch.inference_mode():
        attention.plan(AttentionBatch([num_tokens], [num_tokens], [list(range(num_blocks))]))
        step_states = None if states is None else states.of_padding([num_tokens])
        token_T = torch.zeros_like(positions)
        hidden_TD = model(token_T, positions, positions + 1, positions, caches, attention, None, step_states)
        logits = model.gather_logits(model.logits(hidden_TD[: config.max_num_seqs])).float()
        del logits, hidden_TD
    torch.cuda.synchronize(spec.device)
    cache_bytes = num_blocks * config.block_size * bytes_per_token(spec)
    peak = torch.cuda.max_memory_allocated(spec.device) - cache_bytes
    activations = torch.cuda.max_memory_allocated(spec.device) - held
    del attention, caches
    torch.cuda.empty_cache()
    return peak + unmeasured_bytes(config, model, spec.dtype, activations)


def largest_step(config: EngineConfig, model: ServedConfig) -> int:
    """Returns the most tokens of a step."""
    return min(config.max_num_batched_tokens, model.context_limit)


def unmeasured_bytes(config: EngineConfig, model: EngineModel, dtype: torch.dtype, activations: int) -> int:
    """Returns the bytes that steps need besides the weights, the slots, the KV cache and the activations of the largest
    step, whose bytes are given."""
    num_tokens = largest_step(config, model.config)
    graphs = 0
    if not config.enforce_eager:  # graphs reserve what their largest step needs
        graphs = activations * max(graph_token_counts(num_tokens)) // num_tokens
    # Sampling copies the logits several times (sort, softmax in float64, cumulative sum), and so do prompt logprobs.
    vocab_size, context = model.config.vocab_size, config.max_model_len or model.config.context_limit
    sampling = max(config.most_sampled, SCORED_ROWS) * vocab_size * 32
    # Penalties count the tokens of each sequence (token_counts.py). A table needs 1.5 times its size while it grows.
    sampling += config.most_sampled * (vocab_size + context) * 6
    staging = 0
    if config.kv_host_gib:
        state = sum(shape.num_bytes(dtype.itemsize) for shape in model.shard.local.states)
        staging = 2 * (STAGING_BYTES + (max(STAGING_BYTES, state) if state else 0))  # blocks, snapshots
    return graphs + sampling + staging + _expert_delta_bytes(config, model, num_tokens * dtype.itemsize) + (256 << 20)


def _expert_delta_bytes(config: EngineConfig, model: EngineModel, token_bytes: int) -> int:
    """Returns the bytes of what adapters add to experts, which the measured step does without.

    `token_bytes` is the size of one number for each token.
    """
    experts = model.shard.local.experts
    if experts is None or config.lora is None:
        return 0
    return token_bytes * experts.per_token * max(2 * experts.intermediate_size, model.config.hidden_size)


def allocate_states(
    config: EngineConfig, model: EngineModel, dtype: torch.dtype, device: torch.device
) -> StateCache | None:
    """Returns the states of the model's recurrent layers on this rank, or None if it has none."""
    shapes, num_snapshots = model.shard.local.states, snapshots_for(config, model.config)
    if not shapes:
        return None
    num_drafts = draft_states_for(config, model.config)
    try:
        states = StateCache(shapes, config.max_num_seqs, dtype, device, num_snapshots, num_drafts)
    except torch.OutOfMemoryError as error:
        num_slots = config.max_num_seqs + 1 + num_snapshots + num_drafts
        needed = num_slots * sum(shape.num_bytes(dtype.itemsize) for shape in shapes)
        raise ConfigError(
            f"the recurrent states of max_num_seqs={config.max_num_seqs} sequences and state_snapshots={num_snapshots} "
            f"snapshots, and of {num_drafts} draft tokens, need {needed / 2**30:.2f} GiB, more than is free. Lower "
            "max_num_seqs or state_snapshots.",
            "max_num_seqs",
        ) from error
    log.info(
        "recurrent states: %d layers, %d sequences, %.2f GiB",
        len(shapes),
        config.max_num_seqs,
        (states.num_bytes - states.snapshot_bytes) / 2**30,
    )
    log.info("prefix cache: %d snapshots of recurrent states, %.2f GiB", num_snapshots, states.snapshot_bytes / 2**30)
    return states


def draft_states_for(config: EngineConfig, model: ServedConfig) -> int:
    """Returns the number of slots for the states behind draft tokens, which bounds the draft tokens of a step."""
    if config.speculative_config is None or not model.states:
        return 0
    return min(config.max_num_seqs, DRAFTED_SEQS) * config.speculative_config.num_speculative_tokens


def snapshots_for(config: EngineConfig, model: ServedConfig) -> int:
    """Returns the number of snapshots of recurrent states. Raises ConfigError if snapshots are asked for of a model
    that has no such states."""
    if not model.states:
        if config.state_snapshots:
            raise ConfigError(
                f"state_snapshots={config.state_snapshots} is for models with recurrent layers, and this one has none. "
                "Leave it out.",
                "state_snapshots",
            )
        return 0
    if not config.enable_prefix_caching:
        return 0
    if config.state_snapshots is not None:
        return config.state_snapshots
    return max(LEAST_SNAPSHOTS, config.max_num_seqs // SEQS_PER_SNAPSHOT)


def allocate_caches(
    config: EngineConfig,
    model: ServedConfig,
    spec: AttentionSpec,
    num_blocks: int,
    memory: Sequence[Tensor] | None = None,
) -> list[KVCache]:
    """Returns the empty cache of each layer that has attention, with the scales that the checkpoint gives.

    A layer that reads another layer's cache has the same object. Raises ConfigError if they do not fit.

    Args:
        memory: The memory of each tensor, uint8 and zero, with the sizes of block_bytes(). None allocates it.
    """
    scales = _kv_scales(config, model, spec)
    no_room = torch.OutOfMemoryError if spec.device.type == "cuda" else RuntimeError  # torch has no class for a CPU
    try:
        return _allocate(spec, num_blocks, scales, memory)
    except no_room as error:
        tokens = num_blocks * config.block_size
        raise ConfigError(
            f"a KV cache of {tokens} tokens needs {tokens * bytes_per_token(spec) / 2**30:.2f} GiB, more than is free. "
            "Lower kv_cache_tokens or gpu_memory_utilization.",
            "kv_cache_tokens",
        ) from error


def _kv_scales(config: EngineConfig, model: ServedConfig, spec: AttentionSpec) -> list[tuple[float, float]]:
    """Returns (k_scale, v_scale) of each layer that has attention."""
    none = [(1.0, 1.0)] * len(model.attention_layers)
    if config.load_format == "dummy":
        return none
    has_cache = [layer.cache_layer is None for layer in spec.layers]
    names = (model.names, model.stored_names) if isinstance(model, ModelConfig) else (COMMON_NAMES, AS_WRITTEN)
    scales = read_kv_scales(Path(config.model), dict(zip(model.attention_layers, has_cache, strict=True)), *names)
    if scales is None:
        return none
    if spec.kv_dtype != FP8:
        log.info("ignored the checkpoint's KV cache scales, which are for fp8: the KV cache holds %s", spec.kv_dtype)
        return none
    log.info("the KV cache uses the checkpoint's scales")
    return scales


def _allocate(
    spec: AttentionSpec,
    num_blocks: int,
    scales: list[tuple[float, float]],
    memory: Sequence[Tensor] | None = None,
) -> list[KVCache]:
    """Returns the cache of each layer. `scales` has (k_scale, v_scale) of each."""
    given = None if memory is None else iter(memory)

    def empty(*shape: int) -> Tensor:
        if given is None:
            return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device)
        return next(given).view(spec.kv_dtype).view(shape)

    caches: list[KVCache] = []
    for layer, layer_scales in zip(spec.layers, scales, strict=True):
        if layer.cache_layer is not None:
            caches.append(caches[layer.cache_layer])
            continue
        num_kv_heads, key_dim, value_dim = layer.kv_shape
        shape = num_blocks, spec.block_size, num_kv_heads
        k_NPGD = empty(*shape, key_dim)
        k_scale, v_scale = layer_scales
        if layer.values_in_keys:  # and have the keys' scale
            caches.append(KVCache(k_NPGD, k_NPGD[..., :value_dim], k_scale, k_scale))
        else:
            caches.append(KVCache(k_NPGD, empty(*shape, value_dim), k_scale, v_scale))
    return caches

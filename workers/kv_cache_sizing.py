"""Sizes and allocates the KV cache of one rank. On a GPU it gets the memory that the largest step leaves."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.bases.checkpoint import ModelConfig
from lorafleet.workers.bases.weights import read_kv_scales
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.step.planner import SCORED_ROWS
from lorafleet.workers.step.prefill_graphs import graph_token_counts

log = logging.getLogger(__name__)

CPU_CACHE_TOKENS = 65536
CPU_CACHE_BYTES = 1 << 30


def size_cache(config: EngineConfig, model: DecoderModel, spec: AttentionSpec) -> tuple[int, int]:
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
        log.warning("reduced max_model_len from the model's %d to %d tokens, the size of the KV cache", limit, tokens)
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


def allocate_caches(config: EngineConfig, model: ModelConfig, spec: AttentionSpec, num_blocks: int) -> list[KVCache]:
    """Returns the empty cache of each layer, with the scales that the checkpoint gives."""
    return _allocate(spec, num_blocks, _kv_scales(config, model, spec))


def _kv_scales(config: EngineConfig, model: ModelConfig, spec: AttentionSpec) -> list[tuple[float, float]]:
    """Returns (k_scale, v_scale) of each layer."""
    none = [(1.0, 1.0)] * model.num_layers
    if config.load_format == "dummy":
        return none
    scales = read_kv_scales(Path(config.model), model.num_layers)
    if scales is None:
        return none
    if spec.kv_dtype != FP8:
        log.info("ignored the checkpoint's KV cache scales, which are for fp8: the KV cache holds %s", spec.kv_dtype)
        return none
    log.info("the KV cache uses the checkpoint's scales")
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

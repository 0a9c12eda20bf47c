"""Allocates what a rank's steps compute in: the KV cache, recurrent states, inputs, CUDA graphs."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionSpec, KVCache
from lorafleet.workers.attention.flashinfer_memory import flashinfer_bytes
from lorafleet.workers.attention.flashinfer_modules import missing_modules
from lorafleet.workers.attention.module_build import ModuleBuild, ModuleSource
from lorafleet.workers.attention.select import make_attention, refusal
from lorafleet.workers.attention.switching_attention import SwitchingAttention
from lorafleet.workers.base_startup import LoadedBase
from lorafleet.workers.device.routed_experts import RoutedExperts
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.kv_cache_sizing import (
    allocate_caches,
    allocate_states,
    bytes_per_token,
    check_tiers,
    longest_captured,
    size_cache,
)
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.pool.pool_start import PoolStart
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.speculation.draft_model import DraftModel
from lorafleet.workers.step.decode_capture import DecodeCapture
from lorafleet.workers.step.decode_graphs import FIRST_SIZES, DecodeGraphs, graph_sizes
from lorafleet.workers.step.drafted_sizes import DraftedSizes
from lorafleet.workers.step.late_work import LateWork
from lorafleet.workers.step.prefill_graphs import PrefillGraphs, graph_token_counts
from lorafleet.workers.step.reserved_memory import reserve_logits
from lorafleet.workers.step.step_runner import StepRunner

log = logging.getLogger(__name__)


def build_steps(
    config: EngineConfig,
    base: LoadedBase,
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
        attention = switching = SwitchingAttention(attention, partial(_make_beside_steps, spec, caches))
    if draft is not None:
        draft.attach(model, num_blocks + 1)  # before the graphs, which write features
    routed = None  # comes before the graphs, which write into it
    if config.enable_return_routed_experts:
        most_tokens = max(config.max_num_batched_tokens, *graph_sizes(config.max_num_seqs))
        routed = RoutedExperts(model, most_tokens, device)
    trash_slot = num_blocks * config.block_size
    # A step is launched while the inputs of the last one may wait for drafts that the device makes first.
    inputs = StepInputs(config.most_sampled, config.max_num_batched_tokens, trash_slot, device, most_queued=2)
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


def _make_beside_steps(spec: AttentionSpec, caches: list[KVCache]) -> AttentionBackend:
    """Makes the best attention, in another thread than that of the steps. Its memory is ready for their stream when
    this returns."""
    if spec.device.type != "cuda":
        return make_attention(spec, caches)
    with torch.cuda.device(spec.device):
        made = make_attention(spec, caches)
        torch.cuda.synchronize()
    return made


def _late_bytes(config: EngineConfig, model: EngineModel, spec: AttentionSpec, most_tokens: int) -> int:
    """Returns the bytes of the attention that takes over later, beside a KV cache of so many tokens or less."""
    longest = min(config.max_model_len or model.config.context_limit, most_tokens)
    longest = longest_captured(config, model.config, longest, most_tokens // config.block_size)
    sizes = [] if config.enforce_eager else graph_sizes(config.max_num_seqs)
    return flashinfer_bytes(spec, torch.cuda.get_device_capability(spec.device), sizes, longest)

"""Loads a draft model or a head beside the base, and builds what runs it.

KV cache, attention, CUDA graphs and adapter slots are the engine's own parts, with a configuration of their own. A
draft model is whole on one GPU. Under tensor parallelism that is rank 0's, where drafts are decided. A head is divided
among the ranks as its target is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.engine_config import AttentionName, EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionSpec
from lorafleet.workers.attention.select import make_attention, refusal
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.auto_options import base_dtype, kv_dtype, lora_dtype
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.weights import held_tensors
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.kv_cache_sizing import allocate_caches, bytes_per_token
from lorafleet.workers.model_loading import fill_model, weight_bytes
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.slots.base_weights import ModelWeights
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.speculation.draft_heads import DraftHead, fill_head, make_head
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.speculation.draft_steps import DraftSteps
from lorafleet.workers.speculation.draft_tokenizer import check_same_tokenizer
from lorafleet.workers.speculation.eagle_head import EagleHead
from lorafleet.workers.speculation.feature_rows import FeatureRows
from lorafleet.workers.speculation.model_drafter import CAUGHT_UP_TOKENS, ModelDrafter
from lorafleet.workers.step.decode_capture import DecodeCapture
from lorafleet.workers.step.decode_graphs import DecodeGraphs
from lorafleet.workers.step.drafted_sizes import DraftedSizes
from lorafleet.workers.step.late_work import LateWork
from lorafleet.workers.step.prefill_graphs import PrefillGraphs, graph_token_counts
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.link import OtherRanks

log = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)  # Batch sizes of the graphs. Larger batches are hardly ever drafted for.
DRAFTED_COUNTS = (8, 16, 32, 64, 128)  # Rows of the graphs that compute the tokens which were accepted last.
# GPU memory that is left for the draft model's steps and their graphs. The weights, the slots and the KV cache are
# counted by themselves.
STEP_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model with its weights and adapter slots, before it has a KV cache."""

    config: EngineConfig  # The engine's, as far as it concerns the draft model.
    model: DecoderModel | DraftHead
    spec: AttentionSpec
    manager: LoRAModelManager | None  # None if there are no adapters.
    loader: AdapterLoader | None  # Packs the draft LoRAs. None if there are no adapters.
    target_tokens: int  # Most tokens of a step of the target.
    most_sampled: int  # Most tokens that a step chooses.
    most_rows: int  # Most tokens of one sequence that a step chooses.

    @property
    def slots(self) -> DraftSlots | None:
        return None if self.manager is None else DraftSlots(self.manager)

    def late_bytes(self, most_tokens: int, base_token_bytes: int) -> int:
        """Returns the bytes that the draft model takes of a GPU's memory which could hold most_tokens of the base. They
        are so many that it gets as many tokens as the base."""
        return late_draft_bytes(most_tokens, base_token_bytes, self.token_bytes, self.step_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys, values and feature."""
        return bytes_per_token(self.spec) + (0 if self.rows is None else self.rows.token_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of a GPU that its steps and their graphs take, and features of the target's largest step."""
        if self.spec.device.type != "cuda":
            return 0
        return STEP_BYTES + (self.model.tapped_bytes(self.target_tokens) if isinstance(self.model, EagleHead) else 0)

    @property
    def rows(self) -> FeatureRows | None:
        return self.model.drafts if isinstance(self.model, DraftHead) else None

    def attach(self, target: EngineModel, num_blocks: int) -> None:
        """Has the target write features for a head, for each slot of its KV cache of so many blocks. Call it before the
        target's graphs are captured."""
        if isinstance(self.model, DraftHead):
            assert isinstance(target, DecoderModel)
            self.model.drafts.allocate(num_blocks * self.config.block_size)
            target.taps = self.model.taps()

    def longest(self, max_model_len: int) -> int:
        """Returns the number of tokens of the longest sequence that it drafts for."""
        # A head's positions are the target's, whatever lengths it was trained with.
        return max_model_len if self.rows is not None else min(max_model_len, self.model.config.context_limit)

    def drafter(self, steps: DraftSteps, num_blocks: int, max_model_len: int, base_vocab: int) -> ModelDrafter:
        """Returns what drafts with these steps, whose KV cache has so many blocks. It is on rank 0 alone."""
        kv = KVCacheManager(num_blocks, self.config.block_size, self.config.enable_prefix_caching)
        return ModelDrafter(steps, kv, self.slots, base_vocab, self.longest(max_model_len), self.most_rows)

    def steps(self, num_blocks: int, max_model_len: int, others: OtherRanks | None) -> DraftSteps:
        """Allocates a KV cache of so many blocks, and captures the graphs. All ranks that have a part do so together.

        Args:
            others: On rank 0, the other ranks of the replica.
        """
        config, model, device = self.config, self.model, self.spec.device
        longest = self.longest(max_model_len)
        caches = allocate_caches(config, model.config, self.spec, num_blocks + 1)
        attention = make_attention(self.spec, caches, _attention_backend(config, self.spec))
        trash_slot = num_blocks * config.block_size
        # All steps of a call are queued before the device has begun with those of the call before.
        queued = 2 * self.most_rows
        inputs = StepInputs(self.most_sampled, config.max_num_batched_tokens, trash_slot, device, queued)
        decode_graphs = prefill_graphs = None
        if device.type == "cuda" and not config.enforce_eager:
            sizes = [size for size in GRAPH_SIZES if size <= config.max_num_seqs]
            capture = DecodeCapture(model, caches, None, attention, inputs, num_blocks, self.manager, longest, device)
            counts = tuple(count for count in (*DRAFTED_COUNTS, self.most_sampled) if count <= self.most_sampled)
            drafted = DraftedSizes(self.most_rows, config.max_num_seqs, tuple(sorted(set(counts))), frozenset(counts))
            decode_graphs = DecodeGraphs(
                capture, sizes, sizes, self.manager, longest, bool(model.mixtures()), drafted=drafted
            )
            sizes = graph_token_counts(config.max_num_batched_tokens)
            prefill_graphs = PrefillGraphs(model, caches, attention, self.spec, inputs, sizes, self.manager)
        steps = StepRunner(
            model, attention, caches, None, inputs, device, self.manager, decode_graphs, prefill_graphs, LateWork()
        )
        if device.type == "cuda" and self.manager is not None:
            steps.warm_up(config.max_num_batched_tokens, self.manager.max_rank)
        num_tokens = num_blocks * config.block_size
        slot_bytes = 0 if self.manager is None else self.manager.arena_bytes
        log.info(
            "draft model %s: weights %.2f GiB, KV cache of %d tokens %.2f GiB, slots of draft LoRAs %.2f GiB",
            Path(config.model).name,
            weight_bytes(model) / 2**30,
            num_tokens,
            num_tokens * bytes_per_token(self.spec) / 2**30,
            slot_bytes / 2**30,
        )
        return DraftSteps(steps, config.block_size, self.rows, None if self.rows is None else others)


def late_draft_bytes(most_tokens: int, base_token_bytes: int, token_bytes: int, step_bytes: int) -> int:
    """Computes DraftModel.late_bytes() of a model with so many bytes for each token, and for its steps."""
    for_tokens = max(0, most_tokens * base_token_bytes - step_bytes)
    return step_bytes + for_tokens * token_bytes // (token_bytes + base_token_bytes)


def load_drafting_model(config: EngineConfig, base: EngineModel, device: torch.device) -> DraftModel | None:
    """Loads this rank's part of the model of speculative_config. Returns None if it has none. Raises ConfigError if the
    model cannot draft for this engine."""
    if base.group.rank > 0 and config.speculative_config is not None and config.speculative_config.is_on_one_gpu:
        return None
    draft = make_drafting_model(config, base, device, device)
    if draft is None:
        return None
    if isinstance(draft.model, DraftHead):
        fill_head(draft.config, draft.model)
        return draft
    fill_model(draft.config, draft.model)
    if config.lora is None:
        return draft
    manager, loader = _build_adapters(draft_lora_config(config.lora), draft.config, draft.model, device)
    return replace(draft, manager=manager, loader=loader)


def make_drafting_model(
    config: EngineConfig, base: EngineModel, device: torch.device, served_on: torch.device
) -> DraftModel | None:
    """Builds this rank's part of the model of speculative_config with empty weights and without slots for draft LoRAs.
    Returns None if there is no such model. Raises as load_drafting_model() does.

    Args:
        device: Where the weights are, which may be torch's meta device.
        served_on: Where an engine has them.
    """
    options = config.speculative_config
    if options is None or not options.needs_model:
        return None
    if config.lora is not None and config.lora.share_lora_memory:
        raise ConfigError(
            f"speculative_config: method={options.method!r} is not served with share_lora_memory. Leave one of them "
            "out.",
            "speculative_config",
        )
    own = draft_config(config, options.model or config.model)  # The base's checkpoint has the MTP layer.
    model: DecoderModel | DraftHead
    if options.is_on_one_gpu:
        folder = Path(own.model)
        model_config = read_draft_config(folder)
        check_same_tokenizer(Path(config.model), folder, base.config.vocab_size, model_config.vocab_size)
        dtype = base_dtype(own, model_config, folder)
        model = DecoderModel(model_config, TPGroup(), dtype, device)
    else:
        dtype = base.embed_tokens.weight.dtype
        model = make_head(config, own, base, device)
    cached_in = kv_dtype(own, dtype, device)
    spec = attention_spec(model.shard.local, own.block_size, dtype, cached_in, served_on, model.sinks())
    return DraftModel(
        own, model, spec, None, None, config.max_num_batched_tokens, config.most_sampled, options.most_rows
    )


def draft_config(config: EngineConfig, folder: str) -> EngineConfig:
    """Returns the configuration with which the engine's parts run the draft model in a folder."""
    return replace(
        config,
        model=folder,
        model_impl="lorafleet",
        quantization=None,
        tensor_parallel_size=1,
        speculative_config=None,
        max_model_len=None,
        batch_invariant=False,
        kv_host_gib=0.0,
        kv_disk_dir=None,
        kv_disk_gib=0.0,
        state_snapshots=None,
        max_num_batched_tokens=max(CAUGHT_UP_TOKENS, config.most_sampled),
    )


def draft_lora_config(lora: LoRAConfig) -> LoRAConfig:
    """Returns the options of draft LoRAs. They have A and B only, and room for max_loras of the largest rank."""
    return replace(lora, lora_memory_gib=None, extra_memory_gib=0.0, long_lora_scaling_factors=None)


def read_draft_config(folder: Path) -> ModelConfig:
    """Raises ConfigError if the folder has no model that can draft."""
    try:  # Heads are found first, since most of them name an architecture of their own.
        is_head = folder.is_dir() and "draft_vocab_size" in read_json(folder / "config.json")
        model = None if is_head else read_model_config(folder)
    except ConfigError as error:
        raise type(error)(f"speculative_config: {error.message}", "speculative_config") from None
    if model is None:
        raise ConfigError(
            f"speculative_config: {str(folder)!r} is an EAGLE-3 head, not a model. Give method='eagle3'.",
            "speculative_config",
        )
    reason = None
    if model.states:
        reason = "has recurrent layers, whose states cannot go back behind drafts that are wrong"
    elif model.rope.depends_on_length:
        reason = "rotates all keys anew when a sequence gets longer than a limit"
    if reason is not None:
        raise ConfigError(
            f"speculative_config: the draft model {str(folder)!r} ({model.architecture}) {reason}. Give another one.",
            "speculative_config",
        )
    return model


def _build_adapters(
    lora: LoRAConfig, config: EngineConfig, model: DecoderModel, device: torch.device
) -> tuple[LoRAModelManager, AdapterLoader]:
    served = lora_dtype(lora, model.embed_tokens.weight.dtype, device)
    manager = LoRAModelManager(model, lora, served, device)
    weights = ModelWeights(model, held_tensors(model))
    described = Base(BaseLayout.of(model.config), weights, Path(config.model).name)
    loader = AdapterLoader(described, lora, manager, served, device, AdapterStore(config.sources))
    return manager, loader


def _attention_backend(config: EngineConfig, spec: AttentionSpec) -> AttentionName:
    """Returns the attention that needs no compiler, if the option leaves the choice open."""
    if config.attention_backend == "auto" and spec.device.type == "cuda" and refusal("triton", spec) is None:
        return "triton"
    return config.attention_backend

"""Builds one rank of a replica from an EngineConfig: its part of the base, slots of adapters, KV cache, steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import NothingToShare
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionSpec
from lorafleet.workers.attention.select import may_use_flashinfer
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.auto_options import kv_dtype, lora_dtype
from lorafleet.workers.base_startup import LoadedBase, load_base
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.weights import Progress
from lorafleet.workers.bases.weights_digest import digest_of_ranks
from lorafleet.workers.kv_cache_sizing import (
    block_bytes,
)
from lorafleet.workers.kv_tiers.allocate_tiers import allocate_tiers
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.models.fixed_order import check_adapter
from lorafleet.workers.models.generic.architecture import with_implementation
from lorafleet.workers.pool.pool_start import PoolStart, start_pool
from lorafleet.workers.sleep.rank_memory import RankMemory
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights, MovedWeights
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.speculation.draft_heads import DraftHead, fill_head
from lorafleet.workers.speculation.draft_model import DraftModel, load_drafting_model
from lorafleet.workers.speculation.draft_steps import DraftSteps
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.step_startup import build_steps
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import TierContent
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
    base_digest: str = ""  # Of the base's weights on all ranks.

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
    base = load_base(config, rank, addresses, progress, check)
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
        if base.device.type == "cuda":
            torch.cuda.empty_cache()  # Adapters would take a part of a block that one layer's states need again.
        slots.leave_pool(config.lora)
    steps, num_blocks, max_model_len = sized or build_steps(config, base, spec, slots, None, draft)
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
    reload = None if base.reload is None else partial(_reload, config, base.reload, draft)
    memory = RankMemory(steps, slots, list(tiers.values()), base.gate, reload, base.digest, pool, head_steps)
    digest = digest_of_ranks(_gathered(base.digest, base.model.group, base.device))
    return Rank(steps, slots, loader, tiers, memory, num_blocks, max_model_len, pool, drafter, draft_steps, digest)


def _reload(config: EngineConfig, reload_base: Callable[[], None], draft: DraftModel | None) -> None:
    """Reads this rank's part of the base's checkpoint again, with the head that drafts if it has one."""
    reload_base()
    if draft is not None and isinstance(draft.model, DraftHead) and draft.config.model == config.model:
        fill_head(draft.config, draft.model)


def _gathered(digest: str, group: TPGroup, device: torch.device) -> list[str]:
    """Returns the digests of all ranks' parts of the base. Waits for all ranks."""
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    return [bytes(row).hex() for row in group.all_gather(own).tolist()]


def _why_memory_is_fixed(config: EngineConfig, spec: AttentionSpec, draft: DraftModel | None) -> str | None:
    """Returns why adapters and KV blocks do not share memory by default, or None if they do where they can."""
    if draft is not None:
        return "a model drafts"
    if may_use_flashinfer(spec, config.attention_backend, has_fixed_order=config.batch_invariant):
        return "they have not been shared with FlashInfer's attention on a GPU"
    return None


def _attention_spec(config: EngineConfig, base: LoadedBase) -> AttentionSpec:
    cached_in = kv_dtype(config, base.dtype, base.device)
    model = base.model
    return attention_spec(model.shard.local, config.block_size, base.dtype, cached_in, base.device, model.sinks())


def _build_adapters(
    config: EngineConfig,
    lora: LoRAConfig,
    base: LoadedBase,
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
    base: LoadedBase,
    spec: AttentionSpec,
    slots: LoRAModelManager | None,
    pool: PoolStart,
    draft: DraftModel | None,
) -> tuple[StepRunner, int, int] | None:
    """Builds the steps as build_steps() does. Returns None if there is nothing to share, and the user has not asked
    for it."""
    try:
        return build_steps(config, base, spec, slots, pool, draft)
    except NothingToShare as error:
        if config.lora is None or config.lora.share_lora_memory:
            raise
        log.info("adapters and KV blocks have fixed shares of memory: %s", error.message)
        return None


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


def _base_weights(config: EngineConfig, base: LoadedBase) -> BaseWeights | None:
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
    stored_names = model.config.stored_names
    files = FileWeights(Path(config.model), base.dtype, tied, quantization, names, routers, stored_names, base.files)
    return MovedWeights(files, base.device, base.gate)

"""Connects the pool of a GPU's memory with the KV cache, the adapters in slots and their costs."""

from __future__ import annotations

from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
from lorafleet.workers.pool.group_mover import ThreadMover
from lorafleet.workers.pool.kv_groups import KVGroups
from lorafleet.workers.pool.memory_pool import MemoryPool
from lorafleet.workers.pool.pool_cost import HOST_BYTES_PER_S, AdapterUse, PoolCosts, RecentRequests
from lorafleet.workers.pool.pool_start import PoolStart
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.step_budget import StepBudget
from lorafleet.workers.slots.slot_policy import SlotPolicy

QUERY_TOKENS = 10_000  # Prompt tokens that the share of cached ones is measured over at least.
FIRST_SHARE = 0.5  # Of them that is assumed to be cached before any was looked up.


def build_pool(
    start: PoolStart, kv: KVCacheManager, policy: SlotPolicy, budget: StepBudget, tiers: KVTiers | None
) -> tuple[MemoryPool, RecentRequests]:
    """Returns the pool, and the requests that it has to know."""
    assert start.groups is not None
    requests, block_bytes = RecentRequests(), sum(start.groups.layout.part_bytes) / start.groups.layout.blocks

    def costs() -> PoolCosts:
        block_s = kv.block_size * budget.token_s
        if tiers is not None:
            block_s = min(block_s, block_bytes / HOST_BYTES_PER_S)
        hits = kv.counts.hit_tokens + FIRST_SHARE * QUERY_TOKENS
        return PoolCosts(block_s, hits / (kv.counts.query_tokens + QUERY_TOKENS))

    def use_of(digest: str) -> AdapterUse | None:
        return requests.use_of(digest, is_here=policy.find(digest) is not None) if digest else None

    groups = KVGroups(kv, start.groups.layout, start.groups.num_lendable, use_of)
    mover = ThreadMover(start.groups, start.device)
    leaving = (lambda _: None) if tiers is None else tiers.save_now
    return MemoryPool(groups, policy.memory, mover, start.sizes, costs, leaving), requests

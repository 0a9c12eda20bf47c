"""Computes how many KV blocks there are, and how many of them adapters may borrow."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.workers.pool.group_layout import GroupLayout

AUTO_SHARE = 0.5  # Most of the shared memory that adapters may take if no bound is set.
CANDIDATES = 2  # Groups that can be lent, as a multiple of those that may be lent at a time.


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """The bounds of the memory that adapters take."""

    own_bytes: int  # Bytes that are never the KV cache's.
    promised_bytes: int  # Bytes that they get even if sequences wait for blocks then, own_bytes included.
    most_bytes: int  # Bytes that as many of the largest adapters take as there are slots.
    is_exact: bool  # Whether they may take no more than they are promised.


@dataclass(frozen=True, slots=True)
class PoolShares:
    """The groups of KV blocks, and how many of them may be lent."""

    layout: GroupLayout
    most_lent: int  # Number of groups that may be lent at a time.
    num_lendable: int  # Number of groups among which they are chosen.
    promised: int  # Number of groups that may be lent even if sequences wait for blocks then.

    @classmethod
    def of(
        cls, block_bytes: list[int], bounds: PoolBounds, num_blocks: int, kept_blocks: int, *, rounds_up: bool
    ) -> PoolShares:
        """Divides the memory of the KV cache.

        Args:
            block_bytes: Bytes of a KV block in each tensor.
            num_blocks: KV blocks that there is memory for beside all that adapters are promised.
            kept_blocks: KV blocks that are never lent, so that the longest sequence can be served.
            rounds_up: Whether there must be num_blocks at least.
        """
        late_bytes = max(0, bounds.promised_bytes - bounds.own_bytes)
        most_blocks = num_blocks + 1 + late_bytes // sum(block_bytes)  # one for padding
        layout = GroupLayout.of(block_bytes, most_blocks)
        if rounds_up and layout.num_blocks <= num_blocks:
            layout = GroupLayout.of(block_bytes, most_blocks + layout.blocks - 1)
        own, group_bytes = bounds.own_bytes, layout.group_bytes
        bound = bounds.promised_bytes
        if not bounds.is_exact:
            bound = max(bound, int(AUTO_SHARE * (own + group_bytes * layout.num_groups)))
        needed = -(-max(0, bounds.most_bytes - own) // group_bytes) + 1  # one more, since ranges leave gaps
        most_lent = max(0, min(layout.most_lendable(kept_blocks), (bound - own) // group_bytes, needed))
        num_lendable = max(0, min(layout.num_groups - 2, CANDIDATES * most_lent))
        return cls(layout, most_lent, num_lendable, min(most_lent, late_bytes // group_bytes))

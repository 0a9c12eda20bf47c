"""Sizes and allocates the memory that KV blocks and adapters share, in the order of a start.

At first it says whether they can share it. Then the adapters get memory for one of them, and the KV cache all the rest.
"""

from __future__ import annotations

import logging

import torch

from lorafleet.protocol.cuda_driver import CudaDriver, CudaDriverError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.group_memory import Arena, GroupMemory
from lorafleet.workers.pool.memory_pool import PoolSizes
from lorafleet.workers.pool.pool_shares import PoolBounds, PoolShares
from lorafleet.workers.slots.lora_memory import LoRAMemory

log = logging.getLogger(__name__)

LARGEST_GROUP = 1 << 30  # Bytes of a group beyond which too much would move at once.


class PoolStart:
    """The memory of one GPU while an engine starts.

    Args:
        block_bytes: Bytes of a KV block in each tensor of the KV cache.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, block_bytes: list[int]) -> None:
        self.device = device
        self.arena: Arena | None = None  # The adapters' memory; None if it is fixed, and not allocated here.
        self.groups: GroupMemory | None = None  # The KV cache's memory; None likewise.
        self.shares: PoolShares | None = None  # None likewise.
        self._driver = driver
        self._block_bytes = block_bytes
        self._bounds: PoolBounds | None = None

    @property
    def late_bytes(self) -> int:
        """Bytes that are promised to adapters, and the KV cache's at first."""
        return 0 if self._bounds is None else max(0, self._bounds.promised_bytes - self._bounds.own_bytes)

    @property
    def sizes(self) -> PoolSizes:
        assert self._bounds is not None and self.shares is not None
        shares = self.shares
        return PoolSizes(shares.layout.group_bytes, self._bounds.own_bytes, shares.most_lent, shares.promised)

    def least_blocks(self, num_blocks: int) -> int:
        """Returns how many of the KV blocks sequences have even if adapters borrow all that they may."""
        return num_blocks if self.shares is None else num_blocks - self.shares.most_lent * self.shares.layout.blocks

    def own_bytes(self, config: LoRAConfig, largest: int) -> int:
        """Returns the size of the adapters' own memory, which is allocated if more can be borrowed. `largest` is the
        size of A and B of the largest adapter."""
        is_exact, promised = config.lora_memory_gib is not None, config.lora_memory_bytes(largest)
        group_bytes = GroupLayout.of(self._block_bytes, 0).group_bytes
        if is_exact and promised < largest + group_bytes:
            _log_fixed(f"lora_memory_gib has no room for an adapter of max_lora_rank and {group_bytes} bytes more")
            return promised
        own = largest + max(0, promised - largest) % group_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.arena = Arena(self._driver, self.device, own, total)
        self._bounds = PoolBounds(self.arena.own_bytes, promised, config.gpu_loras * largest, is_exact)
        return self.arena.own_bytes

    def divide(self, num_blocks: int, kept_blocks: int, memory: LoRAMemory, *, rounds_up: bool) -> int:
        """Allocates the KV cache in groups if some can be lent. Otherwise it gives the adapters all that they are
        promised. Returns the number of KV blocks, without the one for padding.

        Args:
            memory: The adapters' memory. The other arguments are as in PoolShares.of().
        """
        if self.arena is None or self._bounds is None:
            return num_blocks
        shares = PoolShares.of(self._block_bytes, self._bounds, num_blocks, kept_blocks, rounds_up=rounds_up)
        if not shares.most_lent:
            _log_fixed("the KV cache has no group of blocks that the longest sequence could do without")
            memory.grow(self.arena.own_bytes, self.arena.extend(self.late_bytes))
            return num_blocks
        self.shares = shares
        self.groups = GroupMemory(self._driver, self.device, self.arena, shares.layout, shares.num_lendable)
        log.info(
            "adapters and KV blocks share memory: adapters have %.2f GiB, and may borrow %.2f of the KV cache's %.2f "
            "GiB, %d blocks at a time",
            self._bounds.own_bytes / 2**30,
            shares.most_lent * shares.layout.group_bytes / 2**30,
            self.groups.num_bytes / 2**30,
            shares.layout.blocks,
        )
        return shares.layout.num_blocks - 1


def start_pool(
    lora: LoRAConfig | None, num_ranks: int, device: torch.device, block_bytes: list[int]
) -> PoolStart | None:
    """Returns the pool of this GPU, or None if adapters and KV blocks have fixed shares of memory, which is logged."""
    if lora is None:
        return None
    if device.type != "cuda":
        _log_fixed("adapters are used where they lie in host memory")
        return None
    if num_ranks > 1:
        _log_fixed("the ranks of a replica do not move memory together")
        return None
    if not block_bytes or GroupLayout.of(block_bytes, 0).group_bytes > LARGEST_GROUP:
        _log_fixed("the KV cache has no groups of blocks with whole pages that are small enough")
        return None
    try:
        driver = CudaDriver()
        index = torch.cuda.current_device() if device.index is None else device.index
        if driver.has_virtual_memory(index):
            return PoolStart(driver, device, block_bytes)
        _log_fixed("the GPU has no virtual memory management")
    except CudaDriverError as error:
        _log_fixed(str(error))
    return None


def _log_fixed(reason: str) -> None:
    log.info("adapters and KV blocks have fixed shares of memory: %s", reason)

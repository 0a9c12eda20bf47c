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
from lorafleet.workers.slots.lora_memory import LoRAMemory

log = logging.getLogger(__name__)

LARGEST_GROUP = 1 << 30  # Bytes of a group beyond which too much would move at once.
AUTO_SHARE = 0.5  # Most of the shared memory that adapters may take if no bound is set.
CANDIDATES = 2  # Groups that can be lent, as a multiple of those that may be lent at a time.


class PoolStart:
    """The memory of one GPU while an engine starts.

    Args:
        block_bytes: Bytes of a KV block in each tensor of the KV cache.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, block_bytes: list[int]) -> None:
        self.arena: Arena | None = None  # The adapters' memory; None if it is fixed, and not allocated here.
        self.groups: GroupMemory | None = None  # The KV cache's memory; None likewise.
        self.most_lent = 0  # Number of groups that adapters may borrow at a time.
        self.device = device
        self._driver = driver
        self._block_bytes = block_bytes
        self._is_bounded = False  # Whether the user has set the most that adapters may take.
        self._promised = 0  # Bytes that adapters may take in any case.

    @property
    def late_bytes(self) -> int:
        """Bytes that are promised to adapters, and the KV cache's at first."""
        return 0 if self.arena is None else max(0, self._promised - self.arena.own_bytes)

    @property
    def sizes(self) -> PoolSizes:
        assert self.arena is not None and self.groups is not None
        group_bytes = self.groups.layout.group_bytes
        promised = min(self.most_lent, self.late_bytes // group_bytes)
        return PoolSizes(group_bytes, self.arena.own_bytes, self.most_lent, promised)

    def least_blocks(self, num_blocks: int) -> int:
        """Returns how many of the KV blocks sequences have even if adapters borrow all that they may."""
        return num_blocks if self.groups is None else num_blocks - self.most_lent * self.groups.layout.blocks

    def own_bytes(self, config: LoRAConfig, largest: int) -> int:
        """Returns the size of the adapters' own memory, which is allocated if more can be borrowed. `largest` is the
        size of A and B of the largest adapter."""
        self._is_bounded = config.lora_memory_gib is not None
        self._promised = config.lora_memory_bytes(largest)
        group_bytes = GroupLayout.of(self._block_bytes, 0).group_bytes
        if self._is_bounded and self._promised < largest + group_bytes:
            _log_fixed(f"lora_memory_gib has no room for an adapter of max_lora_rank and {group_bytes} bytes more")
            return self._promised
        own = largest + max(0, self._promised - largest) % group_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.arena = Arena(self._driver, self.device, own, total)
        return self.arena.own_bytes

    def divide(self, num_blocks: int, kept_blocks: int, memory: LoRAMemory, *, rounds_up: bool) -> int:
        """Allocates the KV cache in groups if some can be lent. Otherwise it gives the adapters all that they are
        promised. Returns the number of KV blocks, without the one for padding.

        Args:
            num_blocks: KV blocks that there is memory for beside late_bytes.
            kept_blocks: KV blocks that are never lent, so that the longest sequence can be served.
            memory: The adapters' memory.
            rounds_up: Whether there must be num_blocks at least.
        """
        if self.arena is None:
            return num_blocks
        whole = GroupLayout.of(self._block_bytes, 0)
        most_blocks = num_blocks + 1 + self.late_bytes // sum(self._block_bytes)
        layout = GroupLayout.of(self._block_bytes, most_blocks + (whole.blocks - 1 if rounds_up else 0))
        own, group_bytes = self.arena.own_bytes, layout.group_bytes
        bound = self._promised
        if not self._is_bounded:
            bound = max(bound, int(AUTO_SHARE * (own + group_bytes * layout.num_groups)))
        self.most_lent = min(layout.most_lendable(kept_blocks), (bound - own) // group_bytes)
        if self.most_lent < 1:
            _log_fixed("the KV cache has no group of blocks that the longest sequence could do without")
            memory.grow(own, self.arena.extend(self.late_bytes))
            return num_blocks
        candidates = min(layout.num_groups - 2, CANDIDATES * self.most_lent)
        self.groups = GroupMemory(self._driver, self.device, self.arena, layout, candidates)
        log.info(
            "adapters and KV blocks share memory: adapters have %.2f GiB, and may borrow %.2f of the KV cache's %.2f "
            "GiB, %d blocks at a time",
            own / 2**30,
            self.most_lent * group_bytes / 2**30,
            layout.num_groups * group_bytes / 2**30,
            layout.blocks,
        )
        return layout.num_blocks - 1


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

"""Sizes and allocates the memory that KV blocks and adapters share, in the order of a start.

The adapters get memory for one of them, and the KV cache all the rest.
"""

from __future__ import annotations

import logging

import torch

from lorafleet.protocol.cuda_driver import CudaDriver, CudaDriverError
from lorafleet.protocol.errors import ConfigError, NothingToShare
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.options import enough_gib
from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.group_memory import Arena, GroupMemory
from lorafleet.workers.pool.memory_pool import PoolSizes
from lorafleet.workers.pool.pool_shares import PoolBounds, PoolShares

log = logging.getLogger(__name__)

LARGEST_GROUP = 1 << 30  # Bytes of a group beyond which too much would move at once.


class PoolStart:
    """The memory of one GPU while an engine starts.

    Args:
        block_bytes: Bytes of a KV block in each tensor of the KV cache.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, block_bytes: list[int]) -> None:
        self.device = device
        self.arena: Arena | None = None  # The adapters' memory; None before own_bytes().
        self.groups: GroupMemory | None = None  # The KV cache's memory; None before divide().
        self.shares: PoolShares | None = None  # None before divide().
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
        """Allocates the adapters' own memory, and returns its size. Raises ConfigError if there is nothing to borrow.
        `largest` is the size of A and B of the largest adapter."""
        is_exact, promised = config.lora_memory_gib is not None, config.lora_memory_bytes(largest)
        group_bytes = GroupLayout.of(self._block_bytes, 0).group_bytes
        if is_exact and promised < largest + group_bytes:
            raise ConfigError(
                f"lora.lora_memory_gib is {config.lora_memory_gib}; with lora.share_lora_memory it must be at least "
                f"{enough_gib(largest + group_bytes)}, for one adapter of max_lora_rank and a group of KV blocks. "
                "Raise it, or leave one of them out.",
                "lora_memory_gib",
            )
        own = largest + max(0, promised - largest) % group_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.arena = Arena(self._driver, self.device, own, total)
        self._bounds = PoolBounds(self.arena.own_bytes, promised, config.gpu_loras * largest, is_exact)
        return self.arena.own_bytes

    def divide(self, num_blocks: int, kept_blocks: int, *, rounds_up: bool) -> int:
        """Allocates the KV cache in groups, and returns the number of KV blocks without the one for padding. Raises
        NothingToShare if no group can be lent. The arguments are as in PoolShares.of()."""
        assert self.arena is not None and self._bounds is not None
        shares = PoolShares.of(self._block_bytes, self._bounds, num_blocks, kept_blocks, rounds_up=rounds_up)
        if not shares.most_lent:
            raise NothingToShare(
                f"lora.share_lora_memory has nothing to share: the longest sequence needs {kept_blocks} of the KV "
                f"cache's {shares.layout.num_blocks} blocks, and {shares.layout.blocks} move at a time. Lower "
                "max_model_len, or leave it out.",
                "share_lora_memory",
            )
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
    lora: LoRAConfig | None,
    num_ranks: int,
    device: torch.device,
    block_bytes: list[int],
    why_not: str | None = None,
) -> PoolStart | None:
    """Returns the pool of this GPU, or None if adapters and KV blocks have fixed shares of memory. Raises ConfigError
    if the user wants them to share it and they cannot.

    Args:
        why_not: why they have fixed shares unless the user wants something else; None if there is no reason.
    """
    if lora is None or lora.share_lora_memory is False:
        return None
    if lora.share_lora_memory:
        return _start(num_ranks, device, block_bytes)
    if device.type != "cuda":  # There is no choice that a log could explain: adapters are used where they lie.
        return None
    if lora.lora_memory_gib is not None:
        why_not = "lora.lora_memory_gib is set"
    try:
        if why_not is None:
            return _start(num_ranks, device, block_bytes)
    except ConfigError as error:
        why_not = error.message
    log.info("adapters and KV blocks have fixed shares of memory: %s", why_not)
    return None


def _start(num_ranks: int, device: torch.device, block_bytes: list[int]) -> PoolStart:
    if device.type != "cuda":
        raise _refusal("it is for GPUs, since adapters on a CPU are used where they lie in host memory")
    if num_ranks > 1:
        raise _refusal(f"it is for one GPU a replica, and tensor_parallel_size is {num_ranks}")
    group_bytes = GroupLayout.of(block_bytes, 0).group_bytes if block_bytes else 0
    if not 0 < group_bytes <= LARGEST_GROUP:
        raise _refusal(
            f"{group_bytes} bytes of this model's KV cache would have to move at a time; at most {LARGEST_GROUP} may"
        )
    try:
        driver = CudaDriver()
        index = torch.cuda.current_device() if device.index is None else device.index
        if not driver.has_virtual_memory(index):
            raise _refusal("this GPU has no virtual memory management")
    except CudaDriverError as error:
        raise _refusal(str(error)) from error
    return PoolStart(driver, device, block_bytes)


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"lora.share_lora_memory cannot be used: {reason}. Leave it out.", "share_lora_memory")

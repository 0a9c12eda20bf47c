"""Allocates the tiers of one rank: for KV blocks, and for snapshots of states if the model has recurrent layers.

A snapshot takes as much memory as many blocks, so it has slots of its own. With recurrent layers, blocks and snapshots
get half of the bytes each. How many blocks a snapshot needs depends on the lengths of the conversations, which nobody
knows at the start. Whatever they are, half of the bytes hold half of what the best division would.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lorafleet.kernels.decoder.block_copies import BlockCopies
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import KVCache
from lorafleet.workers.device.state_cache import StateCache
from lorafleet.workers.kv_tiers.block_movers import BlockMover, HostMover, StreamMover, cache_tensors
from lorafleet.workers.kv_tiers.disk_blocks import DiskBlocks
from lorafleet.workers.kv_tiers.host_blocks import HostBlocks, slot_bytes
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.rank_messages import TierContent

log = logging.getLogger(__name__)

NAMES: dict[TierContent, str] = {"blocks": "KV block", "states": "snapshot of states"}


def allocate_tiers(
    config: EngineConfig, caches: list[KVCache], states: StateCache | None, group: TPGroup, device: torch.device
) -> dict[TierContent, RankTiers]:
    """Allocates the tiers, with as many slots on all ranks. Returns none if they are off. Raises ConfigError if they do
    not fit."""
    if not config.kv_host_gib:
        return {}
    copies: dict[TierContent, BlockCopies] = {
        "blocks": BlockCopies(cache_tensors([(cache.k_NPGD, cache.v_NPGD) for cache in caches]))
    }
    unused = {"blocks": len(caches[0].k_NPGD) - 1}  # the block of captured steps' padding
    if states is not None:
        copies["states"] = BlockCopies([tensor for tensor in states.tensors if tensor.numel()])
        unused["states"] = states.padding_slot
    sizes: dict[TierContent, int] = {content: slot_bytes(copies[content].row_bytes) for content in copies}
    num_host, num_disk = (_num_slots(config, name, sizes, group, device) for name in ("kv_host_gib", "kv_disk_gib"))
    other_bytes = sum(num_disk[content] * sizes[content] for content in sizes)
    tiers: dict[TierContent, RankTiers] = {}
    for content, size in sizes.items():
        disk = None
        other_bytes -= num_disk[content] * size
        if config.kv_disk_dir is not None:
            disk = DiskBlocks(Path(config.kv_disk_dir), num_disk[content], size, other_bytes=other_bytes)
        host = HostBlocks(num_host[content], size, device)
        log.info(
            "KV tiers: room for %d x one %s of %.2f MiB in host memory, %d on disk",
            num_host[content],
            NAMES[content],
            size / 2**20,
            num_disk[content],
        )
        mover = _mover(copies[content], host, device, unused[content])
        tiers[content] = RankTiers(group.rank, mover, host, disk, content)
    return tiers


def _num_slots(
    config: EngineConfig, name: str, sizes: dict[TierContent, int], group: TPGroup, device: torch.device
) -> dict[TierContent, int]:
    """Divides the bytes of a tier, which is named by its option."""
    gib: float = getattr(config, name)
    share = int(gib * 2**30) // len(sizes)
    slots: dict[TierContent, int] = {content: group.least(share // size, device) for content, size in sizes.items()}
    for content, count in slots.items():
        if not gib or count:
            continue
        needed = f"{sizes[content] / 2**20:.2f} MiB"
        if len(sizes) == 1:
            raise ConfigError(f"{name}={gib} is less than one KV block of {needed}. Raise it, or leave it out.", name)
        raise ConfigError(
            f"{name}={gib} has too little room for one {NAMES[content]} of {needed}, since KV blocks and snapshots get "
            "half of it each. Raise it, or leave it out.",
            name,
        )
    return slots


def _mover(copies: BlockCopies, host: HostBlocks, device: torch.device, unused: int) -> BlockMover:
    """`unused` is a block, or a slot of states, that holds nothing."""
    if device.type != "cuda":
        return HostMover(copies, host)
    mover = StreamMover(copies, host, device)
    mover.warm_up(unused)
    return mover

"""Counts what the KV tiers do, for /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierCounts:
    hit_tokens: Counter[str] = field(default_factory=Counter)  # Tokens that came back, by tier: host, disk.
    # KV blocks that were moved, by direction: gpu_to_host, host_to_gpu, host_to_disk, disk_to_host.
    moved_blocks: Counter[str] = field(default_factory=Counter)
    # KV blocks that were lost, by reason. no_room: the host tier had no slot for a block that left the GPU. damaged: a
    # block could not be read from disk as it was written. unwritten: a block could not be written. late: a request
    # stopped waiting for a block.
    lost_blocks: Counter[str] = field(default_factory=Counter)

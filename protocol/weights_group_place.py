"""Says where a trainer and a server meet in a torch.distributed group. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GroupBackend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class WeightsGroupPlace:
    """The properties on which the members of a group must agree, and this member's rank."""

    name: str
    host: str  # Address of rank 0's store.
    port: int
    world_size: int
    rank: int
    backend: GroupBackend
    timeout_s: float  # Longest time to meet the other members, and of each later operation.

"""The ranks of one tensor-parallel replica and the collectives between them: NCCL on GPUs, gloo on CPUs.

Every rank of a group calls the same collectives in the same order. A group of one does nothing and needs no process
group, so that code for many ranks serves one as well.
"""

# N ranks

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs leave it out

from lorafleet.protocol.errors import EngineDead

# torch 2.13 has a new name for this function, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

JOIN_TIMEOUT_S = 300.0  # a rank may still be importing torch
JOIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TPGroup:
    rank: int = 0
    size: int = 1
    _group: dist.ProcessGroup | None = None

    @classmethod
    def join(
        cls, rank: int, size: int, meeting: str, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> TPGroup:
        """Waits for all ranks and returns the group. Call it once per process.

        Args:
            meeting: The path of a file that does not exist yet, in a private folder. The ranks share a machine, where
                a port could be taken by others and found by anybody.
            check: Called while waiting; raises if it is known that a rank will not come.
        """
        if size == 1:
            return cls()
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        store = FileStore(meeting, size)
        store.set_timeout(timeout)
        _await_all(store, rank, size, check)
        if sys.platform == "linux":  # gloo would use the interface of the host's name, NCCL any but this one
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        return cls(rank, size, dist.group.WORLD)

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert self._group is not None, "a group of one has none"
        return self._group

    def leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def least(self, value: int, device: torch.device) -> int:
        """Returns the smallest of every rank's values. Waits for all ranks."""
        return int(self.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).min())

    def most(self, value: int, device: torch.device) -> int:
        """Returns the largest of every rank's values. Waits for all ranks, unless this one has not joined them."""
        return value if self._group is None else -self.least(-value, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x, [N, *shape], in rank order. All have the same shape."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=self._group)
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrites x with rank 0's, in place, and returns it."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self._group)
        return x


def _await_all(store: FileStore, rank: int, size: int, check: Callable[[], None]) -> None:
    store.set(f"here/{rank}", "")
    everybody = [f"here/{other}" for other in range(size)]
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while not store.check(everybody):
        check()
        if time.monotonic() > deadline_s:
            raise EngineDead(f"not all {size} ranks of the replica joined within {JOIN_TIMEOUT_S:.0f} s.")
        time.sleep(JOIN_POLL_S)

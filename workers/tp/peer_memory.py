"""Opens memory of every rank's GPU that all ranks of a replica can write, over NVLink or PCIe.

torch's symmetric memory maps it: each rank allocates its own, and passes a handle to the others. Multicast is left
off. Nothing here uses it, and setting it up can fail in ways that affect the whole machine.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from lorafleet.kernels.ranks.peer_areas import ALIGNMENT, EMPTY, MOST_RANKS, PROGRAMS, PeerAreas
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)

# Number of memories that this process has opened. torch numbers the messages of each process by a count that never
# restarts, and ranks whose counts differ would wait for each other forever.
_num_opened = 0


class PeerMemory:
    """Memory that all ranks of a group can write. `areas` is for kernels/ranks/peer_areas.py, and valid as long as
    this object lives."""

    def __init__(self, group: TPGroup, device: torch.device, area_bytes: int) -> None:
        """Opens the memory, on all ranks of the group at once. Raises RuntimeError if their GPUs cannot reach each
        other's memory."""
        from torch.distributed import _symmetric_memory as symmetric

        assert area_bytes % ALIGNMENT == 0
        global _num_opened
        _num_opened += 1
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Each rank sees only its own GPU, as device 0, so torch would take all of them for one and the same.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        num_words = PeerAreas.bytes(group.size, area_bytes) // 2
        self._own: Tensor = symmetric.empty(num_words, dtype=torch.int16, device=device).fill_(EMPTY[2])
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self._own, group.process_group)
        addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        calls_P = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self.areas = PeerAreas(group.rank, group.size, addresses, calls_P, area_bytes)
        group.least(0, device)  # nobody sends before all memory is EMPTY


def open_peer_memory(group: TPGroup, device: torch.device, area_bytes: int) -> PeerMemory | None:
    """Opens the memory, or returns None if collectives must do the work. The result is the same on all ranks.

    It is None if there is no other GPU or there are more than MOST_RANKS, if the GPUs cannot reach each other, or if a
    rank's process belonged to another replica before, with ranks that no longer exist.
    """
    if device.type != "cuda" or group.size == 1 or group.size > MOST_RANKS:
        return None
    if group.least(_num_opened, device) != -group.least(-_num_opened, device):
        log.warning(
            "a rank's process belonged to another replica before, so NCCL sums small steps too: start a new process"
        )
        return None
    memory = None
    try:
        memory = PeerMemory(group, device, area_bytes)
    except RuntimeError as error:
        log.warning("the ranks' GPUs cannot access each other's memory, so NCCL sums small steps too: %s", error)
    return memory if group.least(int(memory is not None), device) else None

"""Memory of every rank's GPU that all ranks of a replica can read and write, over NVLink or PCIe.

torch's symmetric memory maps it: allocated by each, its handle passed to the others. Multicast is left off: nothing
here uses it, and setting it up can fail in ways that concern the whole machine.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from lorafleet.kernels.rank_sum import EMPTY, MOST_RANKS, PROGRAMS, PeerRows
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)

# Of rows that each other rank sends. Of two ranks each gets as much as any algorithm would send it; of more, every row
# goes to all, and larger sums are left to collectives, which divide the work. Measured by benchmarks/rank_sum.py.
AREA_BYTES_OF_TWO = 64 << 20
AREA_BYTES = 2 << 20


class PeerMemory:
    """rows: what kernels/rank_sum.py needs; valid as long as this lives."""

    def __init__(self, group: TPGroup, device: torch.device) -> None:
        """All ranks of the group at once. Raises RuntimeError where their GPUs cannot reach each other's memory."""
        from torch.distributed import _symmetric_memory as symmetric

        area_bytes = AREA_BYTES_OF_TWO if group.size == 2 else AREA_BYTES
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Each rank sees its own GPU only, as device 0: torch would take them for one and the same.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        num_words = PeerRows.bytes(group.size, area_bytes) // 2
        self._own: Tensor = symmetric.empty(num_words, dtype=torch.int16, device=device).fill_(EMPTY[2])
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self._own, group.process_group)
        addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        calls_P = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self.rows = PeerRows(group.rank, group.size, addresses, calls_P, area_bytes)
        group.least(0, device)  # nobody sends before all memory is EMPTY


def open_peer_memory(group: TPGroup, device: torch.device) -> PeerMemory | None:
    """None where there is no other GPU, or where the GPUs cannot reach each other: then collectives do the work."""
    if device.type != "cuda" or group.size == 1 or group.size > MOST_RANKS:
        return None
    memory = None
    try:
        memory = PeerMemory(group, device)
    except RuntimeError as error:
        log.warning("the ranks' GPUs cannot reach each other's memory, so NCCL sums small steps too: %s", error)
    return memory if group.least(int(memory is not None), device) else None

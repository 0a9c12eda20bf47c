"""Memory of every rank's GPU that all ranks of a replica can read and write, over NVLink or PCIe.

torch's symmetric memory maps it: allocated by each, its handle passed to the others. Multicast is left off: nothing
here uses it, and setting it up can fail in ways that concern the whole machine.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from lorafleet.kernels.rank_sum import BYTES, MOST_RANKS, PROGRAMS, PeerRows
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)


class PeerMemory:
    """rows: what kernels/rank_sum_triton.py needs; valid as long as this lives."""

    def __init__(self, group: TPGroup, device: torch.device) -> None:
        """All ranks of the group at once. Raises RuntimeError where their GPUs cannot reach each other's memory."""
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Each rank sees its own GPU only, as device 0: torch would take them for one and the same.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._own: Tensor = symmetric.empty(BYTES, dtype=torch.uint8, device=device)
        self._own.zero_()
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self._own, group.process_group)
        addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        calls_P = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self.rows = PeerRows(group.rank, group.size, addresses, calls_P)
        group.least(0, device)  # nobody writes flags before all have cleared theirs


def open_peer_memory(group: TPGroup, device: torch.device) -> PeerMemory | None:
    """None where there is no other GPU, or where the GPUs cannot reach each other: then collectives do the work."""
    if device.type != "cuda" or group.size == 1 or group.size > MOST_RANKS:
        return None
    memory = None
    try:
        memory = PeerMemory(group, device)
    except RuntimeError as error:
        log.warning("the ranks' GPUs cannot read each other's memory, so NCCL sums small steps too: %s", error)
    return memory if group.least(int(memory is not None), device) else None

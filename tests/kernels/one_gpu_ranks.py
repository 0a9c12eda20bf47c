"""The ranks of a tensor-parallel group as streams of one GPU: what kernels over peer areas need of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lorafleet.kernels.ranks.peer_areas import EMPTY, PROGRAMS, PeerAreas

T = TypeVar("T")


class Ranks:
    """Their programs must all find room on the GPU at once, where there are more than two ranks."""

    def __init__(self, size: int, area_bytes: int) -> None:
        words = PeerAreas.bytes(size, area_bytes) // 2
        self._memory = [torch.empty(words, dtype=torch.int16, device="cuda") for _ in range(size)]
        addresses = torch.tensor([m.data_ptr() for m in self._memory], dtype=torch.int64, device="cuda")
        self.areas = [
            PeerAreas(rank, size, addresses, torch.zeros(PROGRAMS, dtype=torch.int32, device="cuda"), area_bytes)
            for rank in range(size)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(size)]

    def warm_up(self, call: Callable[[PeerAreas], object]) -> None:
        """A kernel that is loaded while another runs might wait for that one, which waits for it. So all are loaded
        while the memory is not EMPTY, when no kernel waits."""
        for memory in self._memory:
            memory.zero_()
        for areas in self.areas:
            call(areas)
            torch.cuda.synchronize()
        for memory, areas in zip(self._memory, self.areas, strict=True):
            memory.fill_(EMPTY[2])
            areas.calls_P.zero_()

    def run(self, call: Callable[[PeerAreas], T]) -> list[T]:
        torch.cuda.synchronize()
        results = []
        for areas, stream in zip(self.areas, self._streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(areas))
        torch.cuda.synchronize()
        return results

    @property
    def is_empty(self) -> bool:
        return all((m == EMPTY[2]).all() or (m.view(torch.int32) == EMPTY[4]).all() for m in self._memory)

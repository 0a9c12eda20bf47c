"""The ranks of a tensor-parallel group as processes under Triton's interpreter, with memory that all of them map."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from lorafleet.kernels.ranks.peer_areas import EMPTY, PROGRAMS, PeerAreas

TIMEOUT_S = 120


class ProcessRanks:
    """Each call forks its ranks, so all of them have the memory at the same address."""

    def __init__(self, size: int, area_bytes: int) -> None:
        words = PeerAreas.bytes(size, area_bytes) // 2
        self._memory = [torch.full((words,), EMPTY[2], dtype=torch.int16).share_memory_() for _ in range(size)]
        addresses = torch.tensor([m.data_ptr() for m in self._memory], dtype=torch.int64)
        self.areas = [
            PeerAreas(rank, size, addresses, torch.zeros(PROGRAMS, dtype=torch.int32).share_memory_(), area_bytes)
            for rank in range(size)
        ]

    def run(self, call: Callable[[PeerAreas], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Returns what each rank's call returns. Raises EOFError if a rank fails, and TimeoutError if one waits."""
        context = get_context("fork")
        pipes, processes = [], []
        for areas in self.areas:
            mine, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_send_result, args=(theirs, call, areas), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        try:
            return [_result(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    @property
    def is_empty(self) -> bool:
        return all((m == EMPTY[2]).all() or (m.view(torch.int32) == EMPTY[4]).all() for m in self._memory)


def _send_result(pipe: Connection, call: Callable[[PeerAreas], tuple[Tensor, ...]], areas: PeerAreas) -> None:
    pipe.send([tensor.numpy() for tensor in call(areas)])
    pipe.close()


def _result(pipe: Connection) -> tuple[Tensor, ...]:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("a rank waits for numbers that nobody sends")
    return tuple(torch.from_numpy(array) for array in pipe.recv())

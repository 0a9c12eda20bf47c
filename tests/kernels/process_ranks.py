"""The ranks of a tensor-parallel group as processes under Triton's interpreter, with memory that all of them map."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from lorafleet.kernels.ranks.peer_areas import EMPTY, PROGRAMS, PeerAreas

TIMEOUT_S = 120
WHOLE = {np.dtype(np.int16): ctypes.c_int16, np.dtype(np.int32): ctypes.c_int32}  # what is sent between ranks


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
    interpreter._interpreter = WholeNumbers(interpreter._interpreter)
    pipe.send([tensor.numpy() for tensor in call(areas)])
    pipe.close()


def _result(pipe: Connection) -> tuple[Tensor, ...]:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("a rank waits for numbers that nobody sends")
    return tuple(torch.from_numpy(array) for array in pipe.recv())


class WholeNumbers:
    """Triton's interpreter in C++, with loads and stores of integers that are one access each, as on a GPU.

    Its own are memcpy(), which takes two accesses for two bytes: another process may see one half of a number.
    """

    def __init__(self, interpreted: object) -> None:
        self._interpreted = interpreted

    def __getattr__(self, name: str) -> object:
        return getattr(self._interpreted, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        kind = WHOLE.get(dtype)
        if kind is None:
            return self._interpreted.load(pointers, mask, other, dtype)  # type: ignore[attr-defined,no-any-return]
        bits = np.broadcast_to(other, pointers.shape).astype(dtype).view(kind)
        for place, is_read in np.ndenumerate(mask):
            if is_read:
                bits[place] = kind.from_address(int(pointers[place])).value
        return bits.view(dtype)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        kind = WHOLE.get(values.dtype)
        if kind is None:
            self._interpreted.store(pointers, values, mask)  # type: ignore[attr-defined]
            return
        bits = np.ascontiguousarray(np.broadcast_to(values, pointers.shape)).view(kind)
        for place, is_written in np.ndenumerate(mask):
            if is_written:
                kind.from_address(int(pointers[place])).value = int(bits[place])

"""Moves groups of KV blocks to adapters and back in a thread, so that the engine loop goes on meanwhile.

A move begins when the steps that were launched before it have ended on the GPU, since they may use the memory that
leaves. Later steps do not use it, so they run beside the move. Captures of CUDA graphs do not mind it: they are
captured in mode thread_local.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from lorafleet.workers.pool.group_memory import GroupMemory


@dataclass(frozen=True, slots=True)
class GroupMove:
    group: int  # The group of KV blocks.
    region: int  # The place of its memory among the adapters' regions.
    to_adapters: bool


class GroupMover(Protocol):
    def begin(self, move: GroupMove) -> None:
        """Begins a move behind the steps that have been launched. Moves are done in their order."""

    def take_done(self) -> list[GroupMove]:
        """Returns the moves that have ended since the last call. Raises what a move has raised, after which the memory
        cannot be used any more."""

    def close(self) -> None:
        """Waits for the moves in progress."""


class ThreadMover:
    """The GroupMover of a GPU."""

    def __init__(self, memory: GroupMemory, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool")
        self._moves: deque[tuple[GroupMove, Future[None]]] = deque()

    def begin(self, move: GroupMove) -> None:
        launched = torch.cuda.Event()
        launched.record(torch.cuda.current_stream(self._device))
        self._moves.append((move, self._thread.submit(self._run, move, launched)))

    def take_done(self) -> list[GroupMove]:
        done: list[GroupMove] = []
        while self._moves and self._moves[0][1].done():
            move, future = self._moves.popleft()
            future.result()
            done.append(move)
        return done

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, move: GroupMove, launched: torch.cuda.Event) -> None:
        launched.synchronize()
        if move.to_adapters:
            self._memory.lend(move.group, move.region)
        else:
            self._memory.give_back(move.group, move.region)

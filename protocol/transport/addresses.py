"""Addresses at which the ranks of one replica connect. It does not import torch, so the process that starts the ranks
need not either."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAddresses:
    """Addresses for one start of the ranks; they cannot be used a second time."""

    size: int
    # Private folder for the sockets of orders and answers and for the file of TPGroup.join. It must be short, since a
    # Unix socket's path holds 107 bytes at most.
    folder: str

    @property
    def meeting(self) -> str:
        return os.path.join(self.folder, "ranks.store")

    def orders(self, rank: int) -> str:
        return self._socket(f"rank{rank}.sock")

    @property
    def answers(self) -> str:
        return self._socket("ranks.sock")

    def _socket(self, name: str) -> str:
        path = os.path.join(self.folder, name)
        assert len(path.encode()) <= 107, path
        return f"ipc://{path}"

"""Where the ranks of one replica meet. Free of torch, for whoever starts the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAddresses:
    """folder: private, for the sockets of orders and answers and the file of TPGroup.join; short, since a Unix socket's
    path holds 107 bytes at most. Once used it is used up."""

    size: int
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

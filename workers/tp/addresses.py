"""Where the ranks of one replica meet. Free of torch, for whoever starts the ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAddresses:
    """collectives: host:port for TPGroup.join. folder: private, for the sockets of orders and answers; short, since a
    Unix socket's path holds 107 bytes at most."""

    size: int
    collectives: str
    folder: str

    def orders(self, rank: int) -> str:
        return self._socket(f"rank{rank}.sock")

    @property
    def answers(self) -> str:
        return self._socket("ranks.sock")

    def _socket(self, name: str) -> str:
        path = os.path.join(self.folder, name)
        assert len(path.encode()) <= 107, path
        return f"ipc://{path}"


def local_addresses(size: int, folder: str) -> RankAddresses:
    """For ranks that share this machine: they meet on loopback and in a private folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return RankAddresses(size, f"127.0.0.1:{port}", folder)

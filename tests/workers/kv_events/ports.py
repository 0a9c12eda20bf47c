"""Free ports for sockets of KV events."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody uses."""
    candidates = list(range(20_000, 30_000, count))
    random.SystemRandom().shuffle(candidates)
    for first in candidates:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")

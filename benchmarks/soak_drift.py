"""Samples what a server's processes hold, and says how much of it grew over the second half of the samples."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

MAX_DRIFT = 0.03
# What a small process may grow by whatever its size. A kernel takes unused pages of programs back, and gives them
# again; Ray's raylet grows by 1.4 MiB in ten minutes in which nobody asks; Python's table of interned strings, which
# pathlib adds each part of a path to, doubles once to 1.8 MiB.
FLOORS = {"rss": 4 << 20, "anonymous": 4 << 20, "fds": 8.0, "threads": 4.0}
IDLE_CONNECTIONS = 24.0  # to replicas, of which HAProxy keeps up to one a client; they come and go by tens

_ROLES = (
    *("EngineReplica", "WorkerActor", "AdapterRouter", "DirectoryActor", "ServeController", "ProxyActor", "haproxy"),
    *("gcs_server", "raylet", "dashboard/agent", "runtime_env", "dashboard.py", "log_monitor", "monitor.py"),
)


@dataclass(slots=True)
class Held:
    """Of one process, a value for each sample."""

    role: str
    first: int  # its first sample
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FLOORS})

    def add(self, **now: float) -> None:
        for name, value in now.items():
            self.values[name].append(value)


@dataclass(frozen=True, slots=True)
class Drift:
    """Over the second half: start and end of the line fitted through it."""

    who: str
    what: str
    start: float
    end: float

    @property
    def share(self) -> float:
        return (self.end - self.start) / max(self.start, 1.0)

    @property
    def is_flat(self) -> bool:
        """What shrinks leaks nothing."""
        is_pool = self.what == "fds" and self.who.startswith("haproxy")
        return self.share <= MAX_DRIFT or self.end - self.start <= (IDLE_CONNECTIONS if is_pool else FLOORS[self.what])


class Samples:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._held: dict[tuple[int, float], Held] = {}  # by pid and start
        self._num = 0

    def take(self) -> None:
        root = psutil.Process(self._pid)
        for one in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                held = self._held.setdefault((one.pid, one.create_time()), Held(_role(one), self._num))
                held.add(**_memory(one.pid), fds=one.num_fds(), threads=one.num_threads())
        self._num += 1

    def drifts(self) -> list[Drift]:
        """Of every process that was there all through the second half, and of all processes together."""
        half = self._num // 2
        found, total = [], {name: np.zeros(self._num - half) for name in FLOORS}
        numbers: dict[str, int] = {}
        for held in self._held.values():
            number = numbers[held.role] = numbers.get(held.role, 0) + 1
            for name, values in held.values.items():
                begin = max(held.first, half)
                own = values[begin - held.first :]
                total[name][begin - half : begin - half + len(own)] += own
                if held.first <= half and held.first + len(values) == self._num:
                    found.append(fitted(f"{held.role} {number}", name, own))
        return found + [fitted("all together", name, list(values)) for name, values in total.items()]


def fitted(who: str, what: str, values: Sequence[float]) -> Drift:
    """By least squares."""
    if len(values) < 2:
        raise SystemExit("too few samples for a drift: let it run for longer")
    slope, start = np.polyfit(range(len(values)), values, 1)
    return Drift(who, what, float(start), float(start + slope * (len(values) - 1)))


def _memory(pid: int) -> dict[str, float]:
    """In bytes. anonymous: what no file has, in memory or swapped out."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
    if not kib:
        raise psutil.ZombieProcess(pid)
    return {"rss": kib["VmRSS"] * 1024.0, "anonymous": (kib["RssAnon"] + kib["VmSwap"]) * 1024.0}


def _role(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    known = next((role for role in _ROLES if role in title), None)
    return known or re.sub(r"[^\w:.-]+", " ", title)[:40] or process.name()

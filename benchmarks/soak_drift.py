"""Samples the resources of a server's processes, and measures their growth over the second half of the samples."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

MAX_DRIFT = 0.03
# Growth that is allowed for a small process whatever its size. The kernel takes unused pages of programs back and
# returns them later. Ray's raylet grows by 1.4 MiB in ten idle minutes. Python's table of interned strings, to which
# pathlib adds each part of a path, doubles once to 1.8 MiB.
FLOORS = {"rss": 4 << 20, "anonymous": 4 << 20, "fds": 8.0, "threads": 4.0}
IDLE_CONNECTIONS = 24.0  # Connections to replicas. HAProxy keeps up to one per client, and they come and go by tens.

_ROLES = (
    *("EngineReplica", "WorkerActor", "AdapterRouter", "DirectoryActor", "ServeController", "ProxyActor", "haproxy"),
    *("gcs_server", "raylet", "dashboard/agent", "runtime_env", "dashboard.py", "log_monitor", "monitor.py"),
)


@dataclass(slots=True)
class Held:
    """The samples of one process."""

    role: str
    first: int  # The number of its first sample.
    # The values of each resource, one for each sample.
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FLOORS})

    def add(self, **now: float) -> None:
        for name, value in now.items():
            self.values[name].append(value)


@dataclass(frozen=True, slots=True)
class Drift:
    """The growth of one resource over the second half, by the line that is fitted through it."""

    who: str
    what: str
    start: float  # The value of the line at the first sample.
    end: float  # The value of the line at the last sample.

    @property
    def share(self) -> float:
        return (self.end - self.start) / max(self.start, 1.0)

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than is allowed; a resource that shrinks does not leak."""
        is_pool = self.what == "fds" and self.who.startswith("haproxy")
        return self.share <= MAX_DRIFT or self.end - self.start <= (IDLE_CONNECTIONS if is_pool else FLOORS[self.what])


class Samples:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._held: dict[tuple[int, float], Held] = {}  # The samples of each process, by its id and start time.
        self._num = 0

    def take(self) -> None:
        root = psutil.Process(self._pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                held = self._held.setdefault((process.pid, process.create_time()), Held(_role(process), self._num))
                held.add(**_memory(process.pid), fds=process.num_fds(), threads=process.num_threads())
        self._num += 1

    def drifts(self) -> list[Drift]:
        """Returns the drifts of every process that ran all through the second half, and of all processes together."""
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
    """Fits a line through the values by least squares."""
    if len(values) < 2:
        raise SystemExit("there are too few samples to measure drift: increase --minutes")
    slope, start = np.polyfit(range(len(values)), values, 1)
    return Drift(who, what, float(start), float(start + slope * (len(values) - 1)))


def _memory(pid: int) -> dict[str, float]:
    """Returns the bytes of memory of a process. Anonymous memory belongs to no file; it includes swapped pages."""
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

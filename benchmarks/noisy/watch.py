"""Watches the server during an attack: its processes' memory, which of them end, and how soon /health answers."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

MIB = 1 << 20
SAMPLE_S = 1.0
PROBE_S = 10.0  # longest wait for an answer of /health or /metrics
# Those that must not end. A HAProxy gives way to another when a replica comes or goes.
SERVING = ("EngineReplica", "WorkerActor", "AdapterRouter", "DirectoryActor", "ProxyActor")
SETTLED_S = 60.0  # until then a process may still take its role

_Identity = tuple[int, float]  # pid and start: a pid may be given twice


@dataclass(slots=True)
class Seen:
    """grown_mib: by which each process was larger at its peak than before, or in all where it is new. others_cpu: the
    share of the machine's processors that other programs took, which delay everything here: 0 to 1."""

    grown_mib: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    num_zombies: int = 0
    health_s: list[float] = field(default_factory=list)
    metrics_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # by /health and /metrics
    others_cpu: float = 0.0

    @property
    def most_grown(self) -> tuple[str, float]:
        return max(self.grown_mib.items(), key=lambda one: one[1], default=("", 0.0))


class Watch:
    """From its making until `seen` is asked for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._roles: dict[_Identity, str] = {}
        self._before: dict[_Identity, float] = {}
        self._peaks: dict[_Identity, float] = {}
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()
        self._before = {who: _status(process, "VmRSS") for who, process in self._processes().items()}
        for pid, _ in self._before:
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here

    def sample(self) -> None:
        for who, process in self._processes().items():
            self._peaks[who] = max(self._peaks.get(who, 0.0), _status(process, "VmHWM"))

    def seen(self) -> Seen:
        self.sample()
        now = self._processes()
        found = Seen()
        for who, peak in self._peaks.items():
            role = f"{self._roles[who]} {who[0]}"
            found.grown_mib[role] = (peak - self._before.get(who, 0.0)) / MIB
        lost = [who for who in self._before if who not in now and self._roles[who] in SERVING]
        found.lost = sorted(f"{self._roles[who]} {who[0]}" for who in lost)
        found.num_zombies = sum(_is_zombie(one) for one in psutil.Process(self._pid).children(recursive=True))
        others_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        found.others_cpu = max(0.0, others_s / (time.monotonic() - self._began_s) / (psutil.cpu_count() or 1))
        return found

    def _processes(self) -> dict[_Identity, psutil.Process]:
        found = {}
        for process in psutil.Process(self._pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                who = (process.pid, process.create_time())
                if who not in self._roles or time.time() - who[1] < SETTLED_S:
                    self._roles[who] = role_of(process.cmdline() or [process.name()])
                found[who] = process
        return found


def role_of(command: list[str]) -> str:
    """What serves by its role; all else by the program."""
    title = " ".join(command)
    known = next((role for role in SERVING if role in title), None)
    if known is not None:
        return known
    program = next((part for part in command if part.endswith(".py")), command[0])
    return re.sub(r"[^\w:.-]+", " ", program.rpartition("/")[2])[:30]


def _status(process: psutil.Process, name: str) -> float:
    """A size from /proc in bytes; 0 where the process has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024.0 * int(found[1]) if found else 0.0


def _busy_s() -> float:
    """Time of all the machine's processors in which they did something."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_s() -> float:
    """Processor time of this program, the server and the attackers, also of those of them that have ended."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


async def sample_on(watch: Watch) -> None:
    while True:
        await asyncio.to_thread(watch.sample)
        await asyncio.sleep(SAMPLE_S)


async def probe(http: httpx.AsyncClient, path: str, every_s: float, took_s: list[float], refused: list[str]) -> None:
    """Asks for the path over and over."""
    while True:
        began = time.monotonic()
        try:
            answer = await http.get(path)
            if answer.status_code != 200:
                refused.append(f"{path} {answer.status_code}")
        except httpx.HTTPError as error:
            refused.append(f"{path} {type(error).__name__}")
        took_s.append(time.monotonic() - began)
        await asyncio.sleep(every_s)

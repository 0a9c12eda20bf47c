"""Watches the server during an attack: the memory of its processes, which of them end, and how soon /health answers."""

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
PROBE_S = 10.0  # The longest wait for an answer of /health or /metrics.
# Processes that must not end. HAProxy is not among them, as a new one replaces it when a replica comes or goes.
SERVING = ("EngineReplica", "WorkerActor", "AdapterRouter", "DirectoryActor", "ProxyActor")
SETTLED_S = 60.0  # The time within which a new process may still take its role.

_Identity = tuple[int, float]  # The process id and the start time, since an id may be reused.


@dataclass(slots=True)
class Seen:
    """The state of the server's processes during an attack."""

    # Growth of each process from before the attack to its peak; for a new process its whole size.
    grown_mib: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # Processes of SERVING that ended.
    num_zombies: int = 0
    health_s: list[float] = field(default_factory=list)
    metrics_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # Failed requests to /health and /metrics.
    # The share of the machine's processors, 0 to 1, that other programs used; they delay everything here.
    others_cpu: float = 0.0

    @property
    def most_grown(self) -> tuple[str, float]:
        return max(self.grown_mib.items(), key=lambda item: item[1], default=("", 0.0))


class Watch:
    """Watches the processes below `pid` from its creation until `seen` is called."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._roles: dict[_Identity, str] = {}
        self._before: dict[_Identity, float] = {}
        self._peaks: dict[_Identity, float] = {}
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()
        self._before = {who: _status(process, "VmRSS") for who, process in self._processes().items()}
        for pid, _ in self._before:
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # The peak is counted from here.

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
        found.num_zombies = sum(_is_zombie(process) for process in psutil.Process(self._pid).children(recursive=True))
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
    """Returns the role of a serving process, and the program of any other."""
    title = " ".join(command)
    known = next((role for role in SERVING if role in title), None)
    if known is not None:
        return known
    program = next((part for part in command if part.endswith(".py")), command[0])
    return re.sub(r"[^\w:.-]+", " ", program.rpartition("/")[2])[:30]


def _status(process: psutil.Process, name: str) -> float:
    """Returns a size from /proc in bytes, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024.0 * int(found[1]) if found else 0.0


def _busy_s() -> float:
    """Returns the busy time of all the machine's processors."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_s() -> float:
    """Returns the processor time of this program, the server and the attackers, including processes that have ended."""
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
    """Requests the path over and over."""
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

"""Kills and stops each kind of process of a server under load, and reports what its clients saw.

    python benchmarks/chaos.py                     # two replicas of the demo model on this machine's CPUs
    python benchmarks/chaos.py --only haproxy,router:kill --clients 20
    python benchmarks/chaos.py --only application:replace,replicas:fewer,replicas:more
    python benchmarks/chaos.py --attach URL,PID --models says0,says1    # a server of benchmarks/fleet.py, with GPUs

Further faults are those of operators. application:replace deploys the application again, so that Serve replaces one
replica after another. After it, replicas:fewer drains a replica, and replicas:more starts one. disk:full fills the
file system of the folder --disk for some seconds.

Clients send requests in closed loops, half of them streaming. They compare every answer with the answer to the same
prompt and model before the first fault. So on a GPU, where rounding depends on the batch, the models must be adapters
whose answers do not (random_llama.write_one_token_adapter). The time to recover is from the fault to the start of the
last request that failed. The last columns are the p99 of the wait for a first byte before the fault, for requests that
began in the first 10 s after it, and later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from latency import Percentiles
from local_server import LocalServer, running

DEMO = Path(__file__).resolve().parents[1] / "demo"
MODELS = ("demo", "shout", "json", "pirate")
PROMPTS = ("What colour is a lime?", "Name a fruit.", "How are you today?")
STOPPED_S = 8.0
CALM_S = 3.0  # Time under load before each fault.
WATCHED_S = 15.0  # Time under load after a fault; a server whose raylet or GCS has ended takes longer to recover.
WHOLE_S = 180.0  # Time within which all processes must be running again.
REQUEST_S = 60.0
LEARNT_TIMES = 4  # Number of times that each request is repeated, beside all others, before the first fault.
BACK_S = 10.0  # Within this time after a fault, other requests should be as fast as before.
UNANSWERED_S = 5.0  # A request that has waited this long when the observation ends counts as a failure.
WAYS = {"kill": "killed", "stop": f"stopped for {STOPPED_S:.0f} s"}
# The faults that are not of a process: their ways, and how a report calls them.
OTHER_WAYS = {
    "application": {"replace": "replaced"},
    "replicas": {"fewer": "one fewer", "more": "one more"},
    "disk": {"full": f"full for {STOPPED_S:.0f} s"},
}
LEAST_FILLED_BYTES, MOST_FILLED_BYTES = 4096, 32 << 30
CHANGE = Path(__file__).with_name("change_application.py")
TARGETS = {  # Maps the name of a kind of process to a part of its title or command line.
    "haproxy": "/haproxy -db",
    "haproxy-manager": "ray::WatchedHAProxyManager",
    "router": "ray::ServeReplica:lorafleet:AdapterRouter",
    "replica-front": "ray::ServeReplica:lorafleet:EngineReplica",
    "engine-worker": "ray::WorkerActor",
    "directory": "ray::DirectoryActor",
    "serve-controller": "ray::ServeController",
    "serve-proxy": "ray::ProxyActor",
    "dashboard-agent": "ray::DashboardAgent",
    "runtime-env-agent": "ray::RuntimeEnvAgent",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    began_s: float  # All three times are on the monotonic clock.
    first_s: float | None  # Time of the first byte of the answer.
    ended_s: float
    kind: str  # Either "ok" or the way in which it failed.


@dataclass(slots=True)
class Clients:
    """Sends requests to one server in closed loops."""

    url: str
    models: Sequence[str] = MODELS
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    async def learn(self) -> None:
        """Records the correct answer to every request before the first fault. Requests whose answer depends on what
        runs beside them, since two tokens are equally likely, are left out."""
        async with self._http() as http:
            for model, prompt in itertools.product(self.models, PROMPTS):
                self.expected[model, prompt] = await self._answer(http, model, prompt)
            jobs = [job for job in self.expected for _ in range(LEARNT_TIMES)]
            answers = await asyncio.gather(*(self._answer(http, *job) for job in jobs))
        for job in {job for job, answer in zip(jobs, answers, strict=True) if answer != self.expected[job]}:
            print(f"left out, since its answer varies: {job[0]}, {job[1]!r}")
            del self.expected[job]
        if not self.expected:
            sys.exit(f"no request to {', '.join(self.models)} has the same answer each time; give other --models")

    async def _answer(self, http: httpx.AsyncClient, model: str, prompt: str) -> str:
        answer = await http.post("/v1/completions", json=_request(model, prompt, stream=False))
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    async def run(self, number: int, count: int) -> None:
        """Runs the closed loops until it is cancelled."""
        async with self._http() as http, asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(self._loop(http, number + index))

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, trust_env=False, limits=limits)

    async def _loop(self, http: httpx.AsyncClient, number: int) -> None:
        jobs = itertools.cycle(self.expected)
        for _ in range(number * 5 % len(self.expected)):
            next(jobs)
        for model, prompt in jobs:
            outcome = await self._ask(http, model, prompt, stream=number % 2 == 0)
            self.outcomes.append(outcome)
            if outcome.kind != "ok":
                # A refused connection returns at once; the pause keeps it from being counted a thousand times.
                await asyncio.sleep(0.05)

    async def _ask(self, http: httpx.AsyncClient, model: str, prompt: str, *, stream: bool) -> Outcome:
        began_s = time.monotonic()
        first_s: float | None = None
        body = b""
        try:
            async with http.stream("POST", "/v1/completions", json=_request(model, prompt, stream=stream)) as answer:
                async for piece in answer.aiter_raw():
                    first_s = first_s or time.monotonic()
                    body += piece
            kind = _judge(answer.status_code, body, self.expected[model, prompt], stream=stream)
        except httpx.ConnectError:
            kind = "refused"
        except httpx.TimeoutException:
            kind = "timeout"
        except httpx.HTTPError:
            kind = "cut stream" if stream and first_s is not None else "cut"
        except asyncio.CancelledError:  # The observation is over.
            if time.monotonic() - began_s > UNANSWERED_S:
                self.outcomes.append(Outcome(began_s, first_s, time.monotonic(), "unanswered"))
            raise
        return Outcome(began_s, first_s, time.monotonic(), kind)


def _request(model: str, prompt: str, *, stream: bool) -> dict[str, object]:
    length = {"max_tokens": 32, "ignore_eos": True}  # Long answers keep streams in flight at all times.
    return {"model": model, "prompt": prompt, "temperature": 0, "stream": stream, **length}


def _judge(status: int, body: bytes, expected: str, *, stream: bool) -> str:
    if status != 200:
        return str(status)
    if not stream:
        return "ok" if json.loads(body)["choices"][0]["text"] == expected else "WRONG"
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    if any("error" in chunk for chunk in chunks):
        return "error event"
    if events[-1] != b"[DONE]":
        return "cut stream"
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    return "ok" if "".join(texts) == expected else "WRONG"


@dataclass(frozen=True, slots=True)
class Fault:
    target: str  # A key of TARGETS or of OTHER_WAYS.
    way: str

    @classmethod
    def parse(cls, text: str) -> list[Fault]:
        """Returns the faults that `text` stands for: TARGET:WAY, or TARGET for all its ways."""
        target, colon, way = text.partition(":")
        ways = _ways(target)
        if not ways or (colon and way not in ways):
            others = [f"{other}:{one}" for other, its_ways in OTHER_WAYS.items() for one in its_ways]
            sys.exit(
                f"{text!r} is not a fault: give one of {', '.join(TARGETS)}, alone or with :kill or :stop, or one of "
                f"{', '.join(others)}"
            )
        return [cls(target, one) for one in ways if way in ("", one)]

    def __str__(self) -> str:
        return f"{self.target} {_ways(self.target)[self.way]}"

    async def victim(self, server: LocalServer) -> psutil.Process:
        for _ in range(50):  # A process that is changing its title at this moment has none.
            if found := processes(server.pid, TARGETS[self.target]):
                return found[0]
            await asyncio.sleep(0.1)
        sys.exit(f"there is no process of the kind {self.target!r} ({TARGETS[self.target]!r})")

    async def inflict(self, server: LocalServer, disk: Path | None) -> None:
        """Does harm, and returns when it is over or, in the case of a killed process, done. `disk` is the folder whose
        file system may be filled."""
        if self.target == "application":
            await _change(server, "replace")
        elif self.target == "replicas":
            count = len(processes(server.pid, TARGETS["replica-front"])) + (1 if self.way == "more" else -1)
            await _change(server, "scale", str(count))
        elif self.target == "disk":
            assert disk is not None
            with filled(disk):
                await asyncio.sleep(STOPPED_S)
        elif self.way == "kill":
            (await self.victim(server)).kill()
        else:
            await _suspend(await self.victim(server))

    def counts_after(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns how many processes of each kind there must be afterwards, from how many there were before."""
        after, fronts = dict(counts), counts["replica-front"]
        if self.target == "replicas":
            after["replica-front"] += 1 if self.way == "more" else -1
            after["engine-worker"] = counts["engine-worker"] // fronts * after["replica-front"]
        return after


def _ways(target: str) -> dict[str, str]:
    return WAYS if target in TARGETS else OTHER_WAYS.get(target, {})


async def _suspend(victim: psutil.Process) -> None:
    victim.suspend()
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # A supervisor may have ended it.
            victim.resume()


async def _change(server: LocalServer, *words: str) -> None:
    """Changes the application by change_application.py. Raises SystemExit if it fails, since its output says why."""
    process = await asyncio.create_subprocess_exec(sys.executable, CHANGE, str(server.pid), *words)
    if status := await process.wait():
        sys.exit(f"{CHANGE.name} {' '.join(words)} ended with status {status}")


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fills the folder's file system with a file, which is removed afterwards. Raises SystemExit if so much is free
    that other programs of this machine may need it."""
    free = shutil.disk_usage(folder).free
    if free > MOST_FILLED_BYTES:
        sys.exit(
            f"{folder} has {free >> 30} GiB free, and disk:full fills at most {MOST_FILLED_BYTES >> 30}. Give --disk a "
            "folder on a file system of its own, such as a tmpfs."
        )
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        size, chunk = 0, free
        while chunk >= LEAST_FILLED_BYTES:
            try:
                os.posix_fallocate(file.fileno(), size, chunk)
                size += chunk
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2
        yield


def processes(pid: int, name: str) -> list[psutil.Process]:
    """Returns the running processes below pid whose title or command line contains the name."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@dataclass(frozen=True, slots=True)
class Report:
    fault: Fault
    num_requests: int
    failures: Counter[str]
    recovered_s: float
    worst_first_byte_s: float
    p99_s: tuple[float | None, float | None, float | None]  # Before the fault, in the first BACK_S after it, and later.

    @classmethod
    def of(cls, fault: Fault, fault_s: float, outcomes: Sequence[Outcome]) -> Report:
        after = [outcome for outcome in outcomes if outcome.ended_s >= fault_s]
        failed = [outcome for outcome in after if outcome.kind != "ok"]
        waits_s = [outcome.first_s - outcome.began_s for outcome in after if outcome.first_s is not None]
        recovered_s = max((outcome.began_s - fault_s for outcome in failed), default=0.0)
        before = [outcome for outcome in outcomes if outcome.ended_s < fault_s]
        p99_s = (
            _first_byte_p99_s(before, 0.0, fault_s),
            _first_byte_p99_s(outcomes, fault_s, fault_s + BACK_S),
            _first_byte_p99_s(outcomes, fault_s + BACK_S, float("inf")),
        )
        kinds = Counter(outcome.kind for outcome in failed)
        return cls(fault, len(after), kinds, max(recovered_s, 0.0), max(waits_s), p99_s)

    def line(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.most_common()) or "none"
        p99 = ", ".join("-" if wait_s is None else f"{1e3 * wait_s:.0f}" for wait_s in self.p99_s)
        return (
            f"| {self.fault} | {self.num_requests} | {kinds} | {self.recovered_s:.1f} | "
            f"{self.worst_first_byte_s:.1f} | {p99} |"
        )


def _first_byte_p99_s(outcomes: Sequence[Outcome], begin_s: float, end_s: float) -> float | None:
    """Returns the p99 of the wait for a first byte, over the answered requests that began in [begin_s, end_s)."""
    waits_s = [
        outcome.first_s - outcome.began_s
        for outcome in outcomes
        if outcome.first_s is not None and outcome.kind == "ok" and begin_s <= outcome.began_s < end_s
    ]
    found = Percentiles.of(waits_s)
    return found and found.p99


HEAD = """| fault | requests after it | failures | recovered after (s) | worst wait for a first byte (s) | its p99: before, 10 s, later (ms) |
|---|---|---|---|---|---|"""  # noqa: E501


async def harm(
    server: LocalServer,
    faults: Sequence[Fault],
    models: Sequence[str],
    num_clients: int,
    watched_s: float,
    disk: Path | None,
) -> list[Report]:
    clients = Clients(server.url, models)
    await clients.learn()
    counts = {name: len(processes(server.pid, title)) for name, title in TARGETS.items()}
    reports = []
    for fault in faults:
        load = asyncio.create_task(clients.run(0, num_clients))
        await asyncio.sleep(CALM_S)
        fault_s = time.monotonic()
        await fault.inflict(server, disk)
        await asyncio.sleep(watched_s)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
        reports.append(Report.of(fault, fault_s, clients.outcomes))
        print(reports[-1].line(), flush=True)
        clients.outcomes.clear()
        counts = fault.counts_after(counts)
        await _wait_until_whole(server, counts, clients)
    return reports


async def _wait_until_whole(server: LocalServer, counts: dict[str, int], clients: Clients) -> None:
    """Waits until all processes run again and every request is answered."""
    deadline_s = time.monotonic() + WHOLE_S
    async with clients._http() as http:
        while time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
            if not all(_is_whole(name, len(processes(server.pid, TARGETS[name])), counts[name]) for name in counts):
                continue
            answers = [await clients._ask(http, *job, stream=False) for job in clients.expected]
            if all(outcome.kind == "ok" for outcome in answers):
                return
    sys.exit(f"the server had not recovered {WHOLE_S:.0f} s after the fault: {counts}")


def _is_whole(name: str, count: int, wanted: int) -> bool:
    """Returns whether there are enough processes of a kind, and no more of a replica's, whose drained ones end."""
    return count == wanted if name in ("replica-front", "engine-worker") else count >= wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--watched-s", type=float, default=WATCHED_S, help="seconds of load after each fault")
    parser.add_argument(
        "--only",
        default=",".join(TARGETS),
        help="kinds of processes to disturb, separated by commas, with :kill or :stop only so; or other faults",
    )
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="disk:full fills the file system of this folder")
    parser.add_argument("--models", default=",".join(MODELS), help="models to ask, separated by commas")
    parser.add_argument("--attach", metavar="URL,PID", help="use a server that `lorafleet serve` has already started")
    options = parser.parse_args()
    faults = [fault for text in options.only.split(",") for fault in Fault.parse(text)]
    if options.disk is None and any(fault.target == "disk" for fault in faults):
        parser.error("disk:full needs --disk FOLDER, a folder on a file system that may be filled")
    models = options.models.split(",")
    with _server(options.attach) as server:
        print(HEAD, flush=True)
        reports = asyncio.run(harm(server, faults, models, options.clients, options.watched_s, options.disk))
    if any(report.failures["WRONG"] for report in reports):
        sys.exit("some answers were wrong")


@contextlib.contextmanager
def _server(attach: str | None) -> Iterator[LocalServer]:
    if attach is not None:
        url, _, pid = attach.rpartition(",")
        yield LocalServer(url, int(pid))
        return
    modules = [f"{name}={DEMO / 'adapters' / name}" for name in MODELS[1:]]
    arguments = ["--model", str(DEMO / "model"), "--served-model-name", "demo", "--num-replicas", "2"]
    arguments += ["--cpu-threads", "1", "--kv-cache-tokens", "8192", "--lora-modules", *modules]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LORAFLEET_STATE_DIR"] = folder
        with running(arguments, Path(folder) / "serve.log") as server:
            yield server


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()

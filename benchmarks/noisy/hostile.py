"""Provides the means of an attack: the address of the server, the keys of a hostile tenant, and common operations.

An attack is a coroutine function that repeats itself forever; `run` stops it when its time is over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ADDRESS = "127.0.0.2"  # The source address of attacks, so that limits per address do not affect the quiet tenant.
ANSWER_S = 30.0  # The longest wait for one answer.
WIDTH = 8  # The number of requests in flight in most attacks.


@dataclass(frozen=True, slots=True)
class Target:
    """Holds everything that an attacking process must know; it is pickled."""

    host: str
    port: int
    pid: int  # The process id of `lorafleet serve`.
    key: str  # The key of the hostile tenant, with the scopes infer and admin.
    base: str  # The name of the base model.
    model: str  # The name of an adapter of the hostile tenant.
    adapter_dir: Path  # Files of a valid adapter; attacks damage copies of them.
    model_dir: Path
    sources_dir: Path  # The hostile tenant may have the server read adapters from here.
    vocab_size: int
    context_len: int

    def pids(self, title: str) -> list[int]:
        """Returns the ids of the server's processes whose title contains this text."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request of an attack."""

    method: str
    path: str
    content: bytes | Callable[[], AsyncIterator[bytes]] = b""  # A stream is created anew each time the call is sent.
    headers: Mapping[str, str] = field(default_factory=dict)


def post(path: str, body: object, **headers: str) -> Call:
    """Returns a JSON request. A string is sent as it is, since json.dumps cannot write every attack."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call("POST", path, content, {"content-type": "application/json"} | headers)


class Hostile:
    """Acts as a hostile tenant. `seen` counts the statuses of its answers, and how its other requests ended."""

    def __init__(self, target: Target, http: httpx.AsyncClient) -> None:
        self.target = target
        self.http = http
        self.seen: Counter[str] = Counter()
        self.tag = f"{os.getpid():x}"  # Makes names that no earlier attack has used.
        self.model = target.model
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"n{self.tag}-{next(self._numbers)}"

    def completion(self, **fields: Any) -> Call:
        body = {"model": self.model, "prompt": "What colour is a lime?", "max_tokens": 16, "ignore_eos": True}
        return post("/v1/completions", body | fields)

    def chat(self, **fields: Any) -> Call:
        message = {"role": "user", "content": "What colour is a lime?"}
        return post("/v1/chat/completions", {"model": self.model, "messages": [message], "max_tokens": 16} | fields)

    def headers(self, call: Call, *, key: str | None = "own") -> dict[str, str]:
        """Returns the call's headers with a key: the hostile tenant's own, another, or none."""
        given = self.target.key if key == "own" else key
        return dict(call.headers) | ({} if given is None else {"authorization": f"Bearer {given}"})

    async def send(self, call: Call, *, key: str | None = "own") -> httpx.Response | None:
        """Sends the call and returns the whole answer, or None if there was none."""
        content = call.content() if callable(call.content) else call.content
        try:
            answer = await self.http.request(
                call.method, call.path, content=content, headers=self.headers(call, key=key)
            )
        except httpx.HTTPError as error:
            self.seen[type(error).__name__] += 1
            await asyncio.sleep(0.02)  # Avoids a busy loop while nothing listens.
            return None
        self.seen[str(answer.status_code)] += 1
        return answer

    async def flood(self, *calls: Call, width: int = WIDTH, key: str | None = "own") -> None:
        """Sends these requests over and over, `width` at a time."""
        await self.flood_with(itertools.cycle(calls), width=width, key=key)

    async def flood_with(self, calls: Iterable[Call], *, width: int = WIDTH, key: str | None = "own") -> None:
        """Sends the requests of a generator, `width` at a time."""
        shared = iter(calls)

        async def sender() -> None:
            for call in shared:
                await self.send(call, key=key)
                await asyncio.sleep(0)

        await together(sender for _ in range(width))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Opens a bare connection to the ingress; call it within `repeated`, which counts failures."""
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port, local_addr=(ADDRESS, 0))
        self.seen["connected"] += 1
        try:
            yield reader, writer
        except asyncio.CancelledError:
            writer.transport.abort()  # close() would wait for the server to read what is buffered.
            raise
        finally:
            writer.close()

    async def repeated(self, action: Callable[[], Awaitable[object]], width: int = WIDTH) -> None:
        """Repeats the action in `width` tasks, and counts failed connections."""

        async def worker() -> None:
            while True:
                try:
                    await action()
                    await asyncio.sleep(0)
                except (OSError, TimeoutError) as error:
                    self.seen[type(error).__name__] += 1
                    await asyncio.sleep(0.02)

        await together(worker for _ in range(width))

    def head(self, method: str = "POST", path: str = "/v1/completions", *lines: str) -> bytes:
        """Returns the head of a request that is authorized by the tenant's key."""
        first = (f"{method} {path} HTTP/1.1", f"host: {self.target.host}", f"authorization: Bearer {self.target.key}")
        return "\r\n".join((*first, "content-type: application/json", *lines, "", "")).encode()

    def written(self, call: Call) -> bytes:
        """Returns the bytes of the whole request, for a bare connection."""
        assert isinstance(call.content, bytes)
        return self.head(call.method, call.path, f"content-length: {len(call.content)}") + call.content


FAILED = "the attack failed"  # The name under which `seen` counts a failed attack.

Attack = Callable[[Hostile], Awaitable[None]]


def name_of(attack: Attack) -> str:
    return attack.__name__.replace("_", "-")


def description_of(attack: Attack) -> str:
    return (attack.__doc__ or "").strip()


async def together(workers: Iterable[Callable[[], Awaitable[None]]]) -> None:
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(_awaited(worker))


async def _awaited(worker: Callable[[], Awaitable[None]]) -> None:
    await worker()


async def run(attacks: Iterable[Attack], target: Target, seconds: float) -> dict[str, Counter[str]]:
    """Runs all attacks for this many seconds; returns the counts of each."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base_url = f"http://{target.host}:{target.port}"
    transport = httpx.AsyncHTTPTransport(local_address=ADDRESS, limits=limits)
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_S, transport=transport, trust_env=False) as http:
        hostiles = {name_of(attack): (attack, Hostile(target, http)) for attack in attacks}
        await asyncio.gather(*(_bounded(attack, hostile, seconds) for attack, hostile in hostiles.values()))
    return {name: hostile.seen for name, (_, hostile) in hostiles.items()}


async def _bounded(attack: Attack, hostile: Hostile, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await attack(hostile)
    except TimeoutError:
        return
    except Exception:  # The other attacks go on, and the report shows the failure.
        traceback.print_exc()
        hostile.seen[FAILED] += 1

"""The means of an attack: the address of the server, the keys of a hostile tenant, and a few verbs.

An attack is a coroutine function that repeats itself for ever; `run` ends it when its time is over.
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

ADDRESS = "127.0.0.2"  # from which attacks come: bounds for an address must not bind the quiet tenant's
ANSWER_S = 30.0  # longest wait for one answer
WIDTH = 8  # requests in flight of most attacks


@dataclass(frozen=True, slots=True)
class Target:
    """Everything that an attacking process must know; it is pickled."""

    host: str
    port: int
    pid: int  # of `lorafleet serve`
    key: str  # of the hostile tenant, with the scopes infer and admin
    base: str  # name of the base model
    model: str  # name of an adapter of the hostile tenant
    adapter_dir: Path  # files of a good adapter, to damage copies of
    model_dir: Path
    sources_dir: Path  # the hostile tenant may have the server read adapters from here
    vocab_size: int
    context_len: int

    def pids(self, title: str) -> list[int]:
        """The server's processes whose title contains this text."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request. `content` may be a stream, which is made anew each time the call is sent."""

    method: str
    path: str
    content: bytes | Callable[[], AsyncIterator[bytes]] = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def post(path: str, body: object, **headers: str) -> Call:
    """A JSON request. Text is sent as it is: an attack may write JSON that json.dumps would not."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call("POST", path, content, {"content-type": "application/json"} | headers)


class Hostile:
    """A hostile tenant at work. `seen` counts the statuses of its answers, and how its other requests ended."""

    def __init__(self, target: Target, http: httpx.AsyncClient) -> None:
        self.target = target
        self.http = http
        self.seen: Counter[str] = Counter()
        self.tag = f"{os.getpid():x}"  # makes names that no earlier attack has used
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
        """The call's own, and the key: the hostile tenant's own, another, or none."""
        given = self.target.key if key == "own" else key
        return dict(call.headers) | ({} if given is None else {"authorization": f"Bearer {given}"})

    async def send(self, call: Call, *, key: str | None = "own") -> httpx.Response | None:
        """The whole answer; None where there was none."""
        content = call.content() if callable(call.content) else call.content
        try:
            answer = await self.http.request(
                call.method, call.path, content=content, headers=self.headers(call, key=key)
            )
        except httpx.HTTPError as error:
            self.seen[type(error).__name__] += 1
            await asyncio.sleep(0.02)  # where nobody listens, no loop without end
            return None
        self.seen[str(answer.status_code)] += 1
        return answer

    async def flood(self, *calls: Call, width: int = WIDTH, key: str | None = "own") -> None:
        """Sends these requests over and over, so many at a time."""
        await self.flood_with(itertools.cycle(calls), width=width, key=key)

    async def flood_with(self, calls: Iterable[Call], *, width: int = WIDTH, key: str | None = "own") -> None:
        """Sends requests that a generator makes, so many at a time."""
        shared = iter(calls)

        async def sender() -> None:
            for call in shared:
                await self.send(call, key=key)
                await asyncio.sleep(0)

        await together(sender for _ in range(width))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A bare connection to the ingress, within `repeated`, which counts how it failed."""
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port, local_addr=(ADDRESS, 0))
        self.seen["connected"] += 1
        try:
            yield reader, writer
        finally:
            writer.close()

    async def repeated(self, action: Callable[[], Awaitable[object]], width: int = WIDTH) -> None:
        """Does something over and over, so many times at once. How connections failed is counted."""

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
        """The head of a request that its key opens."""
        first = (f"{method} {path} HTTP/1.1", f"host: {self.target.host}", f"authorization: Bearer {self.target.key}")
        return "\r\n".join((*first, "content-type: application/json", *lines, "", "")).encode()

    def written(self, call: Call) -> bytes:
        """The whole request, for a bare connection."""
        assert isinstance(call.content, bytes)
        return self.head(call.method, call.path, f"content-length: {len(call.content)}") + call.content


FAILED = "the attack failed"  # among what it has seen

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
    """Lets all of them go on for so long; returns what each has seen."""
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
    except Exception:  # the others go on; the report says so
        traceback.print_exc()
        hostile.seen[FAILED] += 1

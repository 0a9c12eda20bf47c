"""Serves files and batches with the whole API over a scripted engine, in this process, to unchanged OpenAI clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lorafleet.api.access.access import Access
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate, KnownKey
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.batches.batch_records import callers_of
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.batches.batch_runner import BatchRunner
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.batches.batch_work import BatchTiming
from lorafleet.cluster.batches.line_post import LineAnswerer, PostLine
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.s3_store import S3Store
from memory_s3 import MemoryS3
from tests.api.conftest import MemoryCatalog, ScriptedEngine

MODEL = Path(__file__).parents[3] / "demo" / "model"
QUICK = BatchTiming(poll_s=0.02, gather_s=0.02, most_unwritten=4, look_s=0.02, again_s=0.0)
MAX_BYTES = 1 << 20
TENANTS = ("acme", "umbrella")


@dataclass
class House:
    """A server's state. Its runners stand for replicas, which come and go."""

    store: BatchStore
    front: AppState
    engine: ScriptedEngine
    now_s: float = 1_800_000_000.0
    keys: dict[str, KnownKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys |= {
            hashlib.sha256(f"key of {tenant}".encode()).hexdigest(): KnownKey(
                Caller(tenant, f"{tenant}-1", frozenset(("infer",)), key_mark=f"mark of {tenant}-1")
            )
            for tenant in TENANTS
        }
        self.front.access = Access(Gate(keys=lambda: dict(self.keys)))
        self.api = build_api(lambda: self.front, batch_routes(self.store, lambda: MAX_BYTES))
        self.answerer = LineAnswerer(self.api, callers_of(self.front.access.gate))

    def runner(self, post: PostLine | None = None, most_lines: int = 4, timing: BatchTiming = QUICK) -> BatchRunner:
        async def take_turn() -> bool:
            return True

        find_caller = callers_of(self.front.access.gate)
        return BatchRunner(self.store, take_turn, find_caller, post or self.answerer.answer, most_lines, timing)

    @contextlib.asynccontextmanager
    async def running(self, runner: BatchRunner | None = None) -> AsyncIterator[BatchRunner]:
        runner = runner or self.runner()
        task = asyncio.create_task(runner.keep_running())
        try:
            yield runner
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: not runner.num_running)

    def client(self, tenant: str = "acme") -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(self.api)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", timeout=120)
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=f"key of {tenant}", max_retries=0, http_client=http
        )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # What a thread or the store does has no event.
        await asyncio.sleep(0.01)


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "llama", "messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 3}
    return {"custom_id": f"id {number}", "method": "POST", "url": "/v1/chat/completions", "body": body} | fields


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def created(client: openai.AsyncOpenAI, lines: list[dict[str, Any]], **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    given = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | options
    return await client.batches.create(input_file_id=file.id, **given)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.02)


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path)
    memory = MemoryS3()
    return S3Store("s3://bucket/batches", lambda: memory)


@pytest.fixture
def house(store: Store) -> Iterator[House]:
    tokenizer = Tokenizer.from_folder(MODEL)
    engine = ScriptedEngine(tokenizer)
    front = make_state(FrontConfig(("llama",), str(MODEL)), tokenizer, engine, MemoryCatalog())
    clock: list[Callable[[], float]] = [lambda: 0.0]
    made = House(BatchStore(store, lambda: clock[0]()), front, engine)
    clock[0] = lambda: made.now_s
    yield made
    front.close()


def ids(*files: list[dict[str, Any]]) -> Counter[str]:
    return Counter(line["custom_id"] for file in files for line in file)

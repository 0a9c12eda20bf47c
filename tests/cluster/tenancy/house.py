"""Everything of a replica but Ray and HTTP's socket, in one process: a real engine, directory, catalogue and API, and
keys of two tenants, of the public and of the operator."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from lorafleet.api.app_state import make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.cluster.tenancy.key_file import HASH_PREFIX
from lorafleet.cluster.tenancy.key_text import digest_of, make_key
from lorafleet.cluster.tenancy.quota_client import Admit, QuotaTiming
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.protocol.transport.engine_socket import EngineClient, ipc_address
from lorafleet.protocol.transport.unread_outputs import IsStalled
from lorafleet.resolvers.lora_resolver import LoRAResolver
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.worker import GPUWorker

OPERATOR = "the operator's key"
KEYS = {
    "acme": ("acme", ["infer", "admin", "metrics"]),
    "rival": ("rival", ["infer", "admin", "metrics"]),
    "public": (None, ["infer"]),
}
PATIENT_S = 60.0  # for the directory's verdicts: on a slow machine it must not seem to be silent
# Watch calls end soon. The wait after which a silent replica counts as gone stays as it is: machines are slow.
TIMING = DirectoryTiming(hold_s=0.05, admit_s=PATIENT_S)
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14] * 5


@contextmanager
def running_engine(base: Path, folder: Path, lora: LoRAConfig, kv_cache_tokens: int) -> Iterator[tuple[GPUWorker, str]]:
    """A real one and its address, for one house after another."""
    address = ipc_address(str(folder))
    worker = GPUWorker(EngineConfig(model=str(base), kv_cache_tokens=kv_cache_tokens, lora=lora), address)
    try:
        yield worker, address
    finally:
        worker.shutdown()


class House:
    """One replica in it. Callers are named as in KEYS, or "operator"."""

    def __init__(self, folder: Path, worker: GPUWorker, address: str, base: Path) -> None:
        self.folder = folder
        self.keys = {name: make_key() for name in KEYS} | {"operator": OPERATOR}
        self.tenants: dict[str, Any] = {}
        self.resolver: LoRAResolver | None = None
        self.limits: dict[str, Any] = {}  # by the key's id
        self.admit: Admit  # the directory's, which a test may wrap once the house is open
        self.clock: Callable[[], float] = time.monotonic  # of the quotas of this replica
        self._worker, self._address, self._base = worker, address, base

    @property
    def key_file(self) -> str:
        entries = [
            {"id": name, "hash": HASH_PREFIX + digest_of(self.keys[name]), "tenant": tenant, "scopes": scopes}
            for name, (tenant, scopes) in KEYS.items()
        ]
        for entry in entries:
            entry |= {"limits": self.limits.get(str(entry["id"]), {})}
        return json.dumps({"keys": entries, "tenants": self.tenants})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[House]:
        engine = self.engine = await EngineClient.connect(self._address, self._worker.hello())
        self.directory = AdapterDirectory(Catalogue(FolderStore(self.folder / "catalogue")), timing=TIMING)
        await self.directory.load()
        self.administration = Administration(self.directory, ["base"])
        membership = Membership(self.directory, "r", lambda order: obey(engine, order, settle_s=0.01), timing=TIMING)
        await membership.start()
        await membership.become_ready()
        store = self.directory.catalogue.store
        carry_out = self.administration.carry_out
        admin = AdapterAdmin(carry_out, store, ["base"], "run", AdapterStore(SourcesConfig()))
        catalog = DirectoryCatalog(membership, admin, engine, ["base"], self.resolver)
        self.admit = membership.admit
        self.tenancy = tenancy = Tenancy(
            OPERATOR,
            self.key_file,
            self.folder / "usage",
            self.folder / "audit",
            "r",
            lambda *asked: self.admit(*asked),
            QuotaTiming(answer_s=PATIENT_S, probe_s=0.01),
            lambda: self.clock(),
        )
        config = FrontConfig(("base",), "/models/base", allow_runtime_lora_updating=True)
        self.front = make_state(
            config,
            Tokenizer.from_folder(self._base),
            engine,
            catalog,
            tenancy.access,
        )
        for collector in tenancy.collectors:
            self.front.telemetry.metrics.add(collector)
        self.api = build_api(lambda: self.front, [*admin_routes(admin), *trainer_routes(admin)])
        transport = httpx.ASGITransport(self.api)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as self.http:
                yield self
        finally:
            await admin.receivers.close()
            await membership.stop()
            self.front.close()
            tenancy.close()
            await engine.close()

    async def ask(self, caller: str | None, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        headers = {} if caller is None else {"authorization": f"Bearer {self.keys[caller]}"}
        if body is not None:
            more["json"] = body
        if path == "/tokenize":
            headers["content-type"] = "application/json"  # also of a body that is sent in parts
        return await self.http.request(method, path, headers=headers, **more)

    async def complete(self, caller: str, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        return await self.ask(caller, "POST", "/v1/completions", body | {"return_token_ids": True} | fields)

    def hold(self, after: int) -> asyncio.Event:
        """Every answer stops after so many tokens; the event says that one has."""
        held, generate = asyncio.Event(), self.engine.generate

        async def holding(request: EngineRequest, _is_stalled: IsStalled) -> AsyncGenerator[TokenOutput, None]:
            async with aclosing(generate(request)) as outputs:
                missing = after
                while missing:
                    output = await anext(outputs)
                    shown = output.token_ids[:missing]
                    missing -= len(shown)
                    yield msgspec.structs.replace(output, token_ids=shown, finish_reason=None, stop_token_id=None)
                held.set()
                await asyncio.Event().wait()

        self.engine.generate = holding  # type: ignore[method-assign]  # of this one only
        return held

    async def push(self, caller: str, name: str, folder: Path, **query: str) -> httpx.Response:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                tar.add(folder / file, file)
        return await self.ask(caller, "PUT", f"/v1/adapters/{name}/files", content=packed.getvalue(), params=query)

    async def models(self, caller: str) -> list[str]:
        return [one["id"] for one in (await self.ask(caller, "GET", "/v1/models")).json()["data"]]


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def error_of(response: httpx.Response, name: str) -> tuple[int, bytes]:
    """Status and body, as they would be had the name been another."""
    return response.status_code, response.content.replace(name.encode(), b"NAME")

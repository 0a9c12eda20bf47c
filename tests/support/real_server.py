"""Runs a replica without Ray in this process.

It has the whole API and the console over HTTP, a real engine, a real directory and catalogue, and keys if a test wants
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.console.directory_view import DirectoryWindow
from lorafleet.cluster.console.replica_view import replica_view
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.console.view import AdapterView, ReplicaQuery, ReplicaView, Viewer
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.cluster.serve.api_routes import routes_beside
from lorafleet.cluster.serve.reporting import keep_reporting
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.protocol.transport.engine_socket import EngineClient, ipc_address
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.worker import GPUWorker

ADMIN_KEY = "admin-key-of-tests"
BASE = "llama"
LORA = LoRAConfig(max_loras=2)


@dataclass
class RealServer:
    """A running server, and its parts."""

    url: str = ""
    front: AppState | None = None  # A test may replace its configuration.
    worker: GPUWorker | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _catalog: DirectoryCatalog | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def seed(self, name: str, path: Path) -> None:
        """Registers an adapter as `--lora-modules` does: its files stay where they are."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._seed(name, path), self._loop).result()

    async def _seed(self, name: str, path: Path) -> None:
        assert self._catalog is not None
        await self._catalog.seed(*await self._catalog.read_at_start(name, str(path), None))


@contextmanager
def running(
    folder: Path,
    model: Path,
    adapters: dict[str, Path],
    config: dict[str, Any],
    api_keys: Path | None = None,
    lora: LoRAConfig = LORA,
    **engine: Any,
) -> Iterator[RealServer]:
    """Yields a running server. `config` has fields of FrontConfig; `lora` and `engine` have those of EngineConfig."""
    server, ready, failed = RealServer(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            engine_config = EngineConfig(model=str(model), lora=lora, **engine)
            asyncio.run(_serve(server, ready, folder, adapters, config, api_keys, engine_config, lora))
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    try:
        yield server
    finally:
        assert server._loop is not None
        server._loop.call_soon_threadsafe(server._ended.set)
        thread.join()


async def _serve(
    server: RealServer,
    ready: threading.Event,
    folder: Path,
    adapters: dict[str, Path],
    config: dict[str, Any],
    api_keys: Path | None,
    engine: EngineConfig,
    lora: LoRAConfig,
) -> None:
    server._loop = asyncio.get_running_loop()
    address = ipc_address(str(folder))
    server.worker = await asyncio.to_thread(GPUWorker, engine, address)
    client = await EngineClient.connect(address, server.worker.hello())
    try:
        async with _catalogue(folder / "catalogue", client) as (directory, membership, admin):
            catalog = server._catalog = DirectoryCatalog(membership, admin, client, [BASE], None)
            keys = None if api_keys is None else str(api_keys)
            tenancy = Tenancy(ADMIN_KEY, keys, None, None, "r0", membership.admit)
            tokenizer = Tokenizer.from_folder(Path(engine.model))
            front_config = FrontConfig((BASE,), engine.model, replica_id="r0", **config)
            front = server.front = make_state(
                front_config,
                tokenizer,
                client,
                catalog,
                tenancy.access,
            )
            for name, path in adapters.items():
                await catalog.add(name, str(path), load_inplace=False)
            console = _console(directory, front, engine, lora)
            api = build_api(lambda: server.front, routes_beside(admin, console, None, batch_routes()))
            reporting = keep_reporting(client, membership, lora.cpu_loras, engine.max_num_seqs)
            work = [asyncio.create_task(coroutine) for coroutine in (*tenancy.work, reporting)]
            await _answer(server, ready, uvicorn.Config(api, port=0, log_level="warning", lifespan="off", ws="none"))
            for task in work:
                task.cancel()
            front.close()
    finally:
        await client.close()
        await asyncio.to_thread(server.worker.shutdown)


@asynccontextmanager
async def _catalogue(
    folder: Path, engine: EngineClient
) -> AsyncIterator[tuple[AdapterDirectory, Membership, AdapterAdmin]]:
    directory = AdapterDirectory(Catalogue(FolderStore(folder)))
    await directory.load()
    administration = Administration(directory, [BASE])
    administration.resume()

    membership = Membership(directory, "r0", lambda order: obey(engine, order))
    await membership.start()
    await membership.become_ready()
    store = directory.catalogue.store
    admin = AdapterAdmin(administration.carry_out, store, [BASE], "tests", AdapterStore(SourcesConfig()))
    try:
        yield directory, membership, admin
    finally:
        await admin.receivers.close()
        await membership.stop()


def _console(directory: AdapterDirectory, front: AppState, engine: EngineConfig, lora: LoRAConfig) -> StateApi:
    window = DirectoryWindow(directory)

    async def view_adapter(name: str, viewer: Viewer) -> AdapterView | None:
        return window.adapter(name, viewer)

    async def view_replicas(query: ReplicaQuery, viewer: Viewer) -> list[ReplicaView]:
        return [replica_view(front, query, viewer, lora.cpu_loras, engine.max_num_seqs)]

    return StateApi(window.view, view_adapter, view_replicas)


async def _answer(server: RealServer, ready: threading.Event, config: uvicorn.Config) -> None:
    """Serves requests until the test is over."""
    uvicorn_server = uvicorn.Server(config)
    serving = asyncio.create_task(uvicorn_server.serve())
    while not uvicorn_server.started:  # noqa: ASYNC110  # uvicorn has no event for it.
        await asyncio.sleep(0.01)
    server.url = f"http://127.0.0.1:{uvicorn_server.servers[0].sockets[0].getsockname()[1]}"
    ready.set()
    await server._ended.wait()
    uvicorn_server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving

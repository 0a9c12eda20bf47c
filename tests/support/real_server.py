"""A replica without Ray, in this process: the whole API over HTTP, a real engine, a real directory and catalogue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from lorafleet.cluster.admin_api import admin_routes
from lorafleet.cluster.administration import Administration
from lorafleet.cluster.catalog import DirectoryCatalog, obey
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory import AdapterDirectory
from lorafleet.cluster.membership import Membership
from lorafleet.cluster.pushing import AdapterAdmin
from lorafleet.workers.config import EngineConfig
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.openai.api import build_api
from lorafleet.workers.openai.front import Front, FrontConfig
from lorafleet.workers.openai.gate import Gate
from lorafleet.workers.tokenizer import Tokenizer
from lorafleet.workers.transport import EngineClient, ipc_address
from lorafleet.workers.worker import GPUWorker

ADMIN_KEY = "admin-key-of-tests"
BASE = "llama"


@dataclass
class RealServer:
    """front: of which a test may replace the configuration."""

    url: str = ""
    front: Front | None = None
    worker: GPUWorker | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def running(
    folder: Path, model: Path, adapters: dict[str, Path], config: dict[str, Any], **engine: Any
) -> Iterator[RealServer]:
    """config: of FrontConfig. engine: of EngineConfig."""
    server, ready, failed = RealServer(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            asyncio.run(_serve(server, ready, folder, model, adapters, config, engine))
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
    model: Path,
    adapters: dict[str, Path],
    config: dict[str, Any],
    engine_config: dict[str, Any],
) -> None:
    server._loop = asyncio.get_running_loop()
    address = ipc_address(str(folder))
    engine = EngineConfig(model=str(model), lora=LoRAConfig(max_loras=2), **engine_config)
    server.worker = await asyncio.to_thread(GPUWorker, engine, address)
    client = await EngineClient.connect(address, server.worker.hello())
    try:
        async with _catalogue(folder / "catalogue", client) as (catalog, admin):
            tokenizer = Tokenizer.from_folder(model)
            front_config = FrontConfig((BASE,), str(model), **config)
            front = server.front = Front(front_config, tokenizer, client, catalog, gate=Gate(ADMIN_KEY))
            for name, path in adapters.items():
                await catalog.add(name, str(path), load_inplace=False)
            api = build_api(lambda: server.front, admin_routes(admin))
            await _answer(server, ready, uvicorn.Config(api, port=0, log_level="warning", lifespan="off", ws="none"))
            front.close()
    finally:
        await client.close()
        await asyncio.to_thread(server.worker.shutdown)


@asynccontextmanager
async def _catalogue(folder: Path, engine: EngineClient) -> AsyncIterator[tuple[DirectoryCatalog, AdapterAdmin]]:
    directory = AdapterDirectory(Catalogue(FolderStore(folder)))
    await directory.load()
    administration = Administration(directory, [BASE])
    administration.resume()

    async def administer(verb: str, arguments: dict[str, Any]) -> Any:
        return await getattr(administration, verb)(**arguments)

    membership = Membership(directory, "r0", lambda order: obey(engine, order))
    await membership.start()
    await membership.become_ready()
    admin = AdapterAdmin(administer, directory.catalogue.store, [BASE], "tests", lambda path: nullcontext(Path(path)))
    try:
        yield DirectoryCatalog(membership, admin, engine, [BASE], None), admin
    finally:
        await membership.stop()


async def _answer(server: RealServer, ready: threading.Event, config: uvicorn.Config) -> None:
    """Until the test is over."""
    uvicorn_server = uvicorn.Server(config)
    serving = asyncio.create_task(uvicorn_server.serve())
    while not uvicorn_server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    server.url = f"http://127.0.0.1:{uvicorn_server.servers[0].sockets[0].getsockname()[1]}"
    ready.set()
    await server._ended.wait()
    uvicorn_server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving

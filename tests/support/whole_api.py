"""Serves the whole API of a replica in-process, with administration and quality routes, over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from lorafleet.api.access.access import Access
from lorafleet.api.access.gate import Gate
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.quality.book import QualityBook
from lorafleet.cluster.quality.monitor import QualityMonitor
from lorafleet.cluster.quality.probes import QualityProbes
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore

OPERATOR = "the operator's key"
HEADERS = {"authorization": f"Bearer {OPERATOR}", "content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class WholeApi:
    http: httpx.AsyncClient
    directory: AdapterDirectory


@asynccontextmanager
async def serving(front: AppState, folder: Path) -> AsyncIterator[WholeApi]:
    """Serves the front, and replaces its gate by one with the operator's key, which the client sends."""
    directory = AdapterDirectory(Catalogue(FolderStore(folder)))
    await directory.load()
    administration = Administration(directory, ["llama"])

    async def take_turn() -> bool:
        return False

    store = directory.catalogue.store
    admin = AdapterAdmin(administration.carry_out, store, ["llama"], "run", AdapterStore(SourcesConfig()))
    quality = QualityMonitor(front, QualityProbes(100.0, ()), QualityBook(store), take_turn)
    batches = batch_routes(BatchStore(FolderStore(folder / "batches")), lambda: 1 << 30)
    front.access = Access(Gate(OPERATOR))
    more = [*admin_routes(admin), *trainer_routes(admin), *QualityApi(quality).routes(), *batches]
    api = build_api(lambda: front, more)
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=HEADERS, timeout=120
    ) as http:
        yield WholeApi(http, directory)

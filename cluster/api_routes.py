"""The routes that a replica of a cluster has beside those of every front (workers/openai/api.py)."""

from __future__ import annotations

from lorafleet.cluster.admin_api import admin_routes
from lorafleet.cluster.console.page import PAGE_ROUTES
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.pushing import AdapterAdmin
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.workers.openai.api import Route


def routes_beside(admin: AdapterAdmin, console: StateApi, quality: QualityApi | None) -> list[Route]:
    return [*admin_routes(admin), *console.routes(), *PAGE_ROUTES, *(quality.routes() if quality is not None else [])]

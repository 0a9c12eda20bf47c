"""Lists the routes that a replica has in addition to those of every HTTP front (api/routes/build_api.py)."""

from __future__ import annotations

from lorafleet.api.routes.build_api import Route
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.console.page import PAGE_ROUTES
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.quality.routes import QualityApi


def routes_beside(admin: AdapterAdmin, console: StateApi, quality: QualityApi | None) -> list[Route]:
    return [*admin_routes(admin), *console.routes(), *PAGE_ROUTES, *(quality.routes() if quality is not None else [])]

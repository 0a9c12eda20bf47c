"""Lists the routes that a replica has in addition to those of every HTTP front (api/routes/build_api.py)."""

from __future__ import annotations

from collections.abc import Sequence

from lorafleet.api.routes.build_api import Route
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.console.page import PAGE_ROUTES
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.quality.routes import QualityApi


def routes_beside(
    admin: AdapterAdmin, console: StateApi, quality: QualityApi | None, batches: Sequence[Route]
) -> list[Route]:
    probes = [] if quality is None else quality.routes()
    return [*admin_routes(admin), *trainer_routes(admin), *console.routes(), *PAGE_ROUTES, *probes, *batches]

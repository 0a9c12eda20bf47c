"""Serves the console's data, cut to what the viewer may see.

GET /v1/console/state           everything that the console shows
GET /v1/console/adapters/NAME   one adapter, with the history of its aliases

The page polls every few seconds, so an answer that it already has is a 304 without a body.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import Needed, caller_of, sent_key
from lorafleet.api.access.visibility import CallersCatalog
from lorafleet.api.answer.error_responses import http_error
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.routes.build_api import Route
from lorafleet.cluster.console.console_state import BASE, Views, names_of, state_of
from lorafleet.cluster.console.history_state import history_state
from lorafleet.cluster.console.view import (
    ALL_REPLICAS,
    AdapterView,
    DirectoryView,
    ReplicaQuery,
    ReplicaView,
    Viewer,
    ViewQuery,
)
from lorafleet.protocol.errors import LorafleetError, ModelNotFound
from lorafleet.protocol.names import full_name, tenant_of

MAX_SEARCH_CHARS = 256
MAX_ADAPTERS = 200  # Adapters on a page.
MAX_REPLICAS = 100
MAX_LOOKS = 16  # Pages of the directory that one search may read, if most of its results are other tenants'.

ViewDirectory = Callable[[ViewQuery, Viewer], Awaitable[DirectoryView]]
ViewAdapter = Callable[[str, Viewer], Awaitable[AdapterView | None]]
ViewReplicas = Callable[[ReplicaQuery, Viewer], Awaitable[list[ReplicaView]]]


class StateQuery(Strict):
    """The query parameters of /v1/console/state."""

    search: Annotated[str, Field(max_length=MAX_SEARCH_CHARS)] = ""
    after: Annotated[str, Field(max_length=MAX_SEARCH_CHARS)] = ""
    limit: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] = 50
    order: Literal["name", "busiest"] = "name"  # By name, or those with the most requests in the last minutes.
    replicas_after: Annotated[str, Field(max_length=MAX_SEARCH_CHARS)] = ""
    replica_limit: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 24
    replica: Annotated[str, Field(max_length=MAX_SEARCH_CHARS)] = ""  # Shows this replica alone.
    history: bool = False  # Adds time series, of the replica if one is named, and otherwise of the whole fleet.


class StateApi:
    def __init__(self, view_directory: ViewDirectory, view_adapter: ViewAdapter, view_replicas: ViewReplicas) -> None:
        self._view_directory = view_directory
        self._view_adapter = view_adapter
        self._view_replicas = view_replicas

    def routes(self) -> list[Route]:
        return [
            ("GET", "/v1/console/state", "infer", self.state),
            ("GET", "/v1/console/adapters/{name:path}", "infer", self.adapter),
        ]

    async def state(self, front: AppState, request: Request) -> Response:
        asked, viewer = parse_query(request, StateQuery), viewer_of(front, request)
        catalog = front.models.catalog_of(caller_of(request))
        query = ViewQuery(
            asked.search, asked.after, asked.limit, asked.replicas_after, asked.replica_limit, asked.replica
        )
        if asked.order == "busiest" and not asked.search:
            query = msgspec.structs.replace(query, names=tuple(await self._busiest(viewer, asked.limit)))
        directory = await self._page(query, viewer, catalog)
        names = [name for adapter in directory.adapters for name in names_of(adapter)]
        history_of = (asked.replica or ALL_REPLICAS) if asked.history else ""
        views = await self._view_replicas(ReplicaQuery([BASE, *names], history_of), viewer)
        state = state_of(front.config.served_model_names, viewer, directory, views)
        reports = [view.history for view in views if view.history is not None]
        history = history_state(reports, viewer, catalog.sees, time.time()) if reports else None
        return _unless_known({**state, "history": history, "viewer": _rights(front, request, viewer)}, request)

    async def adapter(self, front: AppState, request: Request) -> Response:
        name, viewer = str(request.path_params["name"]), viewer_of(front, request)
        own = full_name(viewer.tenant, name)
        adapter = await self._view_adapter(own, viewer)
        if adapter is None and own != name and front.models.catalog_of(caller_of(request)).sees(name):
            adapter = await self._view_adapter(name, viewer)
        if adapter is None:
            raise ModelNotFound(f"There is no adapter `{name}` in the catalogue.", "name")
        views = Views(await self._view_replicas(ReplicaQuery(names_of(adapter)), viewer), viewer)
        return json_response({**views.adapter(adapter), "history": views.history(adapter)})

    async def _page(self, query: ViewQuery, viewer: Viewer, catalog: CallersCatalog) -> DirectoryView:
        """Returns a page without the public names that are reserved for other tenants, since the directory does not
        know of them."""
        view = await self._view_directory(query, viewer)
        if viewer.sees_all:
            return view
        kept = [adapter for adapter in view.adapters if catalog.sees(adapter.name)]
        last, num_looks = view, 1
        while last.has_more and len(kept) <= query.limit and not (query.search and num_looks == MAX_LOOKS):
            name = last.adapters[-1].name
            public_after = catalog.past(name) if tenant_of(name) is None else query.public_after
            query = msgspec.structs.replace(query, after=name, public_after=public_after)
            last = await self._view_directory(query, viewer)
            kept += [adapter for adapter in last.adapters if catalog.sees(adapter.name)]
            num_looks += 1
        return msgspec.structs.replace(
            view,
            adapters=kept[: query.limit],
            has_more=len(kept) > query.limit,
            names={digest: name for digest, name in view.names.items() if catalog.sees(name)},
            orders=[order for order in view.orders if catalog.sees(order.adapter)],
        )

    async def _busiest(self, viewer: Viewer, limit: int) -> list[str]:
        """Returns the names with the most requests over all replicas."""
        views = await self._view_replicas(ReplicaQuery([]), viewer)
        names = list({name for view in views for name in view.busiest})
        counted = Views(await self._view_replicas(ReplicaQuery(names), viewer), viewer)
        return sorted(names, key=lambda name: (-counted.traffic((name,)).requests, name))[:limit]


def viewer_of(front: AppState, request: Request) -> Viewer:
    """Returns the viewer of a request. If nobody needs a key, nothing is secret: /metrics and /v1/models show
    everything, too."""
    caller = caller_of(request)
    return Viewer(caller.tenant, caller.is_operator or _refusal(front, None, "metrics") is None)


def _rights(front: AppState, request: Request, viewer: Viewer) -> dict[str, object]:
    """Returns what the page should offer. Each call is authorized again."""
    refused = _refusal(front, sent_key(request.headers), "admin")
    return {
        "tenant": viewer.tenant,
        "sees_all": viewer.sees_all,
        "cannot_administer": None
        if refused is None
        else {"code": http_error(refused).code, "message": refused.message},
    }


def _refusal(front: AppState, key: str | None, needed: Needed) -> LorafleetError | None:
    """Returns the error if the key does not grant this access, or None if it does."""
    try:
        front.access.gate.caller(key, needed)
    except LorafleetError as error:
        return error
    return None


def _unless_known(state: dict[str, object], request: Request) -> Response:
    etag = f'"{hashlib.blake2b(msgspec.json.encode(state), digest_size=12).hexdigest()}"'
    headers = {"etag": etag, "cache-control": "no-cache, private", "vary": "authorization"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return json_response(state, headers)

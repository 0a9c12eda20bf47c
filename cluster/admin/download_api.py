"""Serves the route POST /v1/adapters/NAME/download, whose answer is a tar of one version's files.

Errors have a status as long as nothing was sent. Later faults break the connection, which the client notices because it
knows the number of bytes and the digest.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission
from lorafleet.api.answer.responses import while_client_stays
from lorafleet.api.app_state import AppState
from lorafleet.api.request.message_models import request_model
from lorafleet.api.request.parsing import read_body
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import TarFile, describe
from lorafleet.cluster.admin.download_tar import AdapterTar
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.protocol.admin_verbs import (
    DIGEST_HEADER,
    VERSION_HEADER,
    DownloadAdapter,
    LocateAdapter,
    Located,
    route_of,
)
from lorafleet.protocol.errors import ModelNotFound
from lorafleet.protocol.lora_request import turn_group

# Downloads in progress of a tenant (or key without a tenant) on a replica. Each may keep 16 GiB of a removed adapter.
MAX_DOWNLOADS = 4

ROUTE = route_of(DownloadAdapter)
DOWNLOAD_REQUEST = request_model(DownloadAdapter, ROUTE.schema, ROUTE.in_path)

logger = logging.getLogger("lorafleet.http")


def download_route(admin: AdapterAdmin) -> Route:
    @describe(ROUTE.summary, body=DOWNLOAD_REQUEST, answer=TarFile)
    async def download(front: AppState, request: Request) -> Response:
        caller = caller_of(request)
        add_admission(request.scope, front.work_bounds.enter("downloads", MAX_DOWNLOADS, caller))
        version: int | None = (await read_body(front, request, DOWNLOAD_REQUEST)).model_dump()["version"]
        await begin(request, version=version)
        located = await _located(front, request, admin, version)
        group = turn_group(caller.tenant, None)
        packed = await admin.downloads.open(located.lora, group)
        logger.info("admin: %s %s", request.method, request.url.path)
        return TarStream(packed, lambda: admin.downloads.read(packed, group), _headers(located))

    return ROUTE.method, ROUTE.path.replace("{name}", "{name:path}"), "admin", download


async def _located(front: AppState, request: Request, admin: AdapterAdmin, version: int | None) -> Located:
    """Finds the adapter that the path names. Only for the operator, resolvers look for names that are not known yet: a
    tenant downloads its own adapters, and resolvers find public ones. Raises ModelNotFound."""
    caller, name = caller_of(request), str(request.path_params["name"])
    catalog = front.models.catalog_of(caller)
    locate = LocateAdapter(catalog.to_change(name), version)
    try:
        return await admin.administer(locate)
    except ModelNotFound:
        if not caller.is_operator:
            raise
    await catalog.resolve(name)
    return await admin.administer(locate)


def _headers(located: Located) -> dict[str, str]:
    version = {} if located.version is None else {VERSION_HEADER: str(located.version)}
    return {DIGEST_HEADER: located.lora.digest, **version}


class TarStream(Response):
    """A response with the bytes of a tar, which are read one chunk at a time as the client takes them.

    Args:
        read: Returns the next bytes, or b"" at the end.
    """

    media_type = "application/x-tar"

    def __init__(self, packed: AdapterTar, read: Callable[[], Awaitable[bytes]], headers: dict[str, str]) -> None:
        super().__init__(headers=headers | {"content-length": str(packed.num_bytes)})
        self._packed = packed
        self._read = read

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_client_stays(receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                while chunk := await self._read():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._packed.close()

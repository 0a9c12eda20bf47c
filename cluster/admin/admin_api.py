"""Administration of adapters over HTTP, under /v1/adapters, for API keys with the scope admin.

The handlers parse requests and check permissions; administration.py does the work.

A tenant's key administers the tenant's own adapters, by their bare names. The operator's key administers all
adapters, and gives those of a tenant by their full names (`~tenant/name`, protocol/names.py).

GET    /v1/adapters?after=&limit=     lists a page of adapters, in the order of their names
POST   /v1/adapters                   pushes an adapter from a folder of the server or a URI
PUT    /v1/adapters/NAME/files        pushes the files in the body, a tar of config, weights and tokenizer
GET    /v1/adapters/NAME              shows versions, aliases with their history, and pins
DELETE /v1/adapters/NAME              removes the adapter; with ?alias= it removes only that alias
POST   /v1/adapters/NAME/VERB         runs alias, rollback, pin, unpin, prefetch or verify
"""

from __future__ import annotations

import asyncio
import io
import logging
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import Caller, caller_of
from lorafleet.api.access.visibility import check_source
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import parse_json, parse_object, parse_query, read_body
from lorafleet.api.request.request_bodies import Metadata, ModelName
from lorafleet.api.routes.build_api import Handler, Route
from lorafleet.api.routes.operations import TarFile, describe
from lorafleet.cluster.admin.admin_answers import AdapterPage, Prefetched, Removed, ShownAdapter, Verified
from lorafleet.cluster.admin.administration import MAX_ADAPTERS_LISTED, REMOVE_S
from lorafleet.cluster.admin.pushing import AdapterAdmin, as_store_error
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, AliasMove, Share
from lorafleet.protocol import limits
from lorafleet.protocol.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    LANGUAGE_NAMES,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    SAFETENSORS_NAME,
)
from lorafleet.protocol.errors import AdapterMalformed, BodyTooLarge, Forbidden, InvalidRequest
from lorafleet.protocol.limits import Range, cut
from lorafleet.protocol.names import bare_name, check_adapter_name, check_tenant, full_name, tenant_of
from lorafleet.protocol.strict_json import shown as shown_text

MAX_UPLOAD_BYTES = MAX_CONFIG_BYTES + MAX_WEIGHTS_BYTES + sum(LANGUAGE_NAMES.values())
UPLOADED_NAMES = frozenset((CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, *LANGUAGE_NAMES))

MAX_DESCRIPTION_BYTES = 64 << 10  # Largest pax header of a file in an uploaded tar: its times and owner.
MAX_TAR_HEADERS = 4 * len(UPLOADED_NAMES)  # A file may have several pax headers, and each of them counts.

logger = logging.getLogger("lorafleet.http")

Administer = Callable[[AppState, Request], Awaitable[object]]


Place = Annotated[str, AtMost(limits.MAX_PATH_CHARS)]
Replicas = Annotated[int, Within(limits.REPLICAS)]
Weight = Annotated[float, Within(limits.SPLIT_WEIGHT)]
Split = Annotated[dict[Annotated[str, AtMost(10)], Weight], AtMost(limits.MAX_SPLIT)]


class PushOptions(Strict):
    """The options of a push, as in its JSON body."""

    activate: bool = True  # Directs the name's requests to this version.
    replicas: Replicas = 1  # Number of replicas that must load the version before the call returns.
    pin: Replicas | None = None  # Number of replicas to pin the adapter on; None changes no pins.
    base_model_name: ModelName | None = None
    # The tenant that will own the adapter. Only the operator may name another tenant than the caller's own.
    tenant: Annotated[str, AtMost(limits.MAX_TENANT_CHARS)] | None = None
    metadata: Metadata = Field(default_factory=dict)


class PushRequest(PushOptions):
    name: ModelName
    source: Place


class UploadQuery(Strict):
    options: Annotated[str, AtMost(limits.MAX_OPTIONS_CHARS)] = "{}"  # PushOptions as JSON.
    source: Place = "upload"


class ListQuery(Strict):
    after: ModelName = ""
    limit: Annotated[int, Within(Range(1, MAX_ADAPTERS_LISTED))] = 100


class RemoveQuery(Strict):
    alias: ModelName | None = None
    wait_s: Annotated[float, Within(limits.REMOVE_WAIT_S)] = REMOVE_S


class AliasRequest(Strict):
    """A move of an alias to either one version or a split; exactly one of the two must be given."""

    alias: ModelName | None = None  # None: the adapter's own name.
    version: Annotated[int, Within(limits.VERSION)] | None = None
    split: Split | None = None  # Version -> weight.


class RollbackRequest(Strict):
    alias: ModelName | None = None


class ReplicasRequest(Strict):
    replicas: Replicas = 1


class EmptyRequest(Strict):
    pass


def admin_routes(admin: AdapterAdmin) -> list[Route]:
    api = _AdminApi(admin)
    verbs = {name: getattr(api, name) for name in ("alias", "rollback", "pin", "unpin", "prefetch", "verify")}
    name = "/v1/adapters/{name:path}"
    routes: list[tuple[str, str, Administer]] = [
        ("GET", "/v1/adapters", api.list_page),
        ("POST", "/v1/adapters", api.push),
        ("PUT", f"{name}/files", api.upload),
        *(("POST", f"{name}/{verb}", handler) for verb, handler in verbs.items()),
        ("GET", name, api.show),
        ("DELETE", name, api.remove),
    ]
    return [(method, path, "admin", _logged(handler)) for method, path, handler in routes]


def _logged(handler: Administer) -> Handler:
    @wraps(handler)  # This also copies the description from @describe.
    async def logged(front: AppState, request: Request) -> Response:
        answer = await handler(front, request)
        if request.method != "GET":
            logger.info("admin: %s %s", request.method, request.url.path)
        return json_response(answer)

    return logged


class _AdminApi:
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    @describe("A page of adapters, by name", query=ListQuery, answer=AdapterPage)
    async def list_page(self, _: AppState, request: Request) -> object:
        query, tenant = parse_query(request, ListQuery), caller_of(request).tenant
        after = full_name(tenant, query.after)
        data = [shown(one, caller_of(request)) for one in await self._admin.list_adapters(after, query.limit, tenant)]
        return {
            "object": "list",
            "data": data,
            "has_more": len(data) == query.limit,
            "last_id": data[-1]["id"] if data else None,
        }

    @describe("Push an adapter from a folder of the server or a URI", body=PushRequest, answer=ShownAdapter)
    async def push(self, front: AppState, request: Request) -> object:
        body = await read_body(front, request, PushRequest)
        await begin(request, name=body.name, source=body.source, tenant=body.tenant)
        within = await check_source(front.access.tenants, caller_of(request), body.source)
        return await self._push(front, request, body.name, body.source, body.source, body, within)

    @describe("Push an adapter's files", body=TarFile, query=UploadQuery, answer=ShownAdapter)
    async def upload(self, front: AppState, request: Request) -> object:
        query = parse_query(request, UploadQuery)
        options, name = _parse_options(query.options), str(request.path_params["name"])
        await begin(request, name=name, source=query.source, tenant=options.tenant)
        full = _pushed_name(front, request, name, options.tenant)
        async with _unpacked(request, self._admin, full) as folder:
            return await self._push(front, request, name, str(folder), query.source, options)

    @describe("One adapter", answer=ShownAdapter)
    async def show(self, front: AppState, request: Request) -> object:
        return shown(await self._admin.show(_name(front, request)), caller_of(request))

    @describe("Remove an adapter, or one alias", query=RemoveQuery, answer=ShownAdapter | Removed)
    async def remove(self, front: AppState, request: Request) -> object:
        query, name = parse_query(request, RemoveQuery), _name(front, request)
        await begin(request)
        if query.alias is not None:
            adapter = await self._admin.unalias(name, _alias_name(front, request, query.alias) or name)
            return shown(adapter, caller_of(request))
        await self._admin.remove(name, query.wait_s)
        return {"object": "adapter", "id": request.path_params["name"], "removed": True}

    @describe("Move an alias", body=AliasRequest, answer=ShownAdapter)
    async def alias(self, front: AppState, request: Request) -> object:
        body = await read_body(front, request, AliasRequest)
        alias = _alias_name(front, request, body.alias)
        name, shares = _name(front, request), _shares(body)
        await begin(request, alias=body.alias, version=body.version, split=body.split)
        return shown(await self._admin.alias(name, shares, alias), caller_of(request))

    @describe("Move an alias back", body=RollbackRequest, answer=ShownAdapter)
    async def rollback(self, front: AppState, request: Request) -> object:
        body = await read_body(front, request, RollbackRequest)
        alias = _alias_name(front, request, body.alias)
        name = _name(front, request)
        await begin(request, alias=body.alias)
        return shown(await self._admin.rollback(name, alias), caller_of(request))

    @describe("Keep an adapter in slots", body=ReplicasRequest, answer=ShownAdapter)
    async def pin(self, front: AppState, request: Request) -> object:
        body = await read_body(front, request, ReplicasRequest)
        _check_may_pin(request)
        await begin(request, replicas=body.replicas)
        return shown(await self._admin.pin(_name(front, request), body.replicas), caller_of(request))

    @describe("Let an adapter's slots go", body=EmptyRequest, answer=ShownAdapter)
    async def unpin(self, front: AppState, request: Request) -> object:
        await read_body(front, request, EmptyRequest)
        _check_may_pin(request)
        await begin(request)
        return shown(await self._admin.unpin(_name(front, request)), caller_of(request))

    @describe("Load an adapter before it is asked for", body=ReplicasRequest, answer=Prefetched)
    async def prefetch(self, front: AppState, request: Request) -> object:
        body = await read_body(front, request, ReplicasRequest)
        name = _name(front, request)
        await begin(request, replicas=body.replicas)
        replicas = await self._admin.prefetch(name, body.replicas)
        return {"id": request.path_params["name"], "replicas": replicas}

    @describe("Compare an adapter's files with their digests", body=EmptyRequest, answer=Verified)
    async def verify(self, front: AppState, request: Request) -> object:
        await read_body(front, request, EmptyRequest)
        name = _name(front, request)
        await begin(request)
        versions = await self._admin.verify(name)
        return {"id": request.path_params["name"], "verified": [version.number for version in versions]}

    async def _push(
        self,
        front: AppState,
        request: Request,
        name: str,
        path: str,
        source: str,
        options: PushOptions,
        within: str | None = None,
    ) -> object:
        if options.pin is not None:
            _check_may_pin(request)
        full = _pushed_name(front, request, name, options.tenant)
        limits = front.access.tenants.storage_limits(tenant_of(full))
        adapter = await self._admin.push_folder(
            full,
            path,
            within=within,
            source=source,
            activate=options.activate,
            num_replicas=options.replicas,
            base_model_name=options.base_model_name,
            metadata=options.metadata,
            max_adapters=limits.adapters,
            max_bytes=limits.num_bytes,
        )
        if options.pin is not None:
            adapter = await self._admin.pin(full, options.pin)
        return shown(adapter, caller_of(request))


def shown(adapter: AdapterRecord, caller: Caller) -> dict[str, Any]:
    """Returns the adapter as JSON data for the caller. A tenant sees bare names, the operator sees full names."""
    naming = bare_name if caller.tenant is not None else str
    return {
        "id": naming(adapter.name),
        "object": "adapter",
        "tenant": adapter.tenant,
        "pinned_replicas": adapter.pinned_replicas,
        "removing": adapter.removing,
        "versions": [msgspec.to_builtins(one) for one in adapter.versions],
        "aliases": {
            naming(alias): {
                "split": _split(moves[-1]),
                "history": [{"at_s": one.at_s, "split": _split(one)} for one in moves],
            }
            for alias, moves in adapter.aliases.items()
        },
    }


def _split(move: AliasMove) -> dict[str, float]:
    return {str(share.version): share.weight for share in move.shares}


def _name(front: AppState, request: Request) -> str:
    """Returns the full name of the adapter that the request's path names."""
    return front.models.catalog_of(caller_of(request)).to_change(str(request.path_params["name"]))


def _alias_name(front: AppState, request: Request, alias: str | None) -> str | None:
    """Returns the alias's full name, or None if there is no alias. It is in the namespace of the adapter itself, even
    if the operator moves a tenant's alias."""
    if alias is None:
        return None
    check_adapter_name(bare_name(alias))
    return full_name(tenant_of(_name(front, request)), bare_name(alias))


def _pushed_name(front: AppState, request: Request, name: str, tenant: str | None) -> str:
    """Returns the full name of a pushed adapter. Raises Forbidden if the caller may not push for `tenant`."""
    caller = caller_of(request)
    if tenant is None or tenant == caller.tenant:
        return front.models.catalog_of(caller).to_change(name)
    if not caller.is_operator:
        raise Forbidden(f"The API key {caller.key_id!r} is tenant {caller.tenant!r}'s; it cannot push for {tenant!r}.")
    check_tenant(tenant)
    return full_name(tenant, name)


def _check_may_pin(request: Request) -> None:
    """Raises Forbidden unless the operator calls, since a pinned adapter takes a slot from all tenants."""
    if not caller_of(request).is_operator:
        raise Forbidden("Pinning takes slots from all tenants: it needs the operator's key, one of no tenant.")


def _shares(body: AliasRequest) -> list[Share]:
    if (body.version is None) == (body.split is None):
        raise InvalidRequest("Give either `version`, or `split` with a weight for each version.", "version")
    if body.version is not None:
        return [Share(body.version, 1.0)]
    shares = []
    for number, weight in (body.split or {}).items():
        if not number.isdecimal():
            raise InvalidRequest(f"`split` has the version {number!r}; versions are numbers, such as 1.", "split")
        if number != str(int(number)):
            raise InvalidRequest(
                f"`split` has the version {number!r}; write it as {str(int(number))!r}, so that it is there once.",
                "split",
            )
        shares.append(Share(int(number), weight))
    return shares


def _parse_options(text: str) -> PushOptions:
    return parse_object(parse_json(text.encode()), PushOptions, "options.")


@asynccontextmanager
async def _unpacked(request: Request, admin: AdapterAdmin, name: str) -> AsyncIterator[Path]:
    """Unpacks the body, a tar, into a temporary folder, and yields the folder. Only the files that stage() may read are
    unpacked. `name` is the full name of the adapter that they belong to."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-upload-") as folder:
        size = 0
        with tempfile.TemporaryFile(dir=folder) as packed:
            async for part in request.stream():
                size += len(part)
                if size > MAX_UPLOAD_BYTES:
                    raise BodyTooLarge(f"The upload has more than {MAX_UPLOAD_BYTES} bytes; no adapter is that large.")
                with as_store_error():
                    await asyncio.to_thread(packed.write, part)
            packed.seek(0)
            await admin.run_in_turn(name, lambda: _unpack(packed, Path(folder)))
        yield Path(folder)


def _check_headers(packed: IO[bytes]) -> None:
    """Raises TarError if the tar has too many headers, or headers that are unsafe to read. tarfile reads a pax header
    whole into memory, and fills the holes of a sparse file with as many zeros as its header of 512 bytes asks for."""
    num_headers = 0
    while len(block := packed.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE and any(block):
        num_headers += 1
        if num_headers > MAX_TAR_HEADERS:
            raise tarfile.TarError(f"it has more than {MAX_TAR_HEADERS} entries")
        size = tarfile.nti(block[124:136])  # type: ignore[attr-defined]  # its own reader of numbers, not in the stubs
        described = block[156:157] in (tarfile.XHDTYPE, tarfile.XGLTYPE) and 0 <= size <= MAX_DESCRIPTION_BYTES
        if not described and (block[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE) or size < 0):
            raise tarfile.TarError("it has something else than files, or long descriptions of them")
        packed.seek(-(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, io.SEEK_CUR)
    packed.seek(0)


def _unpack(packed: IO[bytes], folder: Path) -> None:
    try:
        _check_headers(packed)
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is None or member.name not in UPLOADED_NAMES:
                    raise AdapterMalformed(
                        f"the upload holds {shown_text(member.name)}; it must be an uncompressed tar of {CONFIG_NAME} "
                        f"and {SAFETENSORS_NAME} (or {BIN_NAME}), and where it has them {', '.join(LANGUAGE_NAMES)}, "
                        "without folders."
                    )
                if (folder / member.name).exists():
                    raise AdapterMalformed(f"the upload holds {member.name} twice.")
                with (folder / member.name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, ValueError) as error:  # ValueError: a malformed number in a pax header.
        raise AdapterMalformed(
            f"the upload is no uncompressed tar of an adapter's files: {cut(str(error))}."
        ) from error

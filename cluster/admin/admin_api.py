"""Administration of adapters over HTTP, under /v1/adapters, for API keys with the scope admin.

The handlers parse requests and check permissions; administration.py does the work.

A tenant's key administers the tenant's own adapters, by their bare names. The operator's key administers all
adapters, and gives those of a tenant by their full names (`~tenant/name`, protocol/names.py).

GET    /v1/adapters?after=&limit=     lists a page of adapters, in the order of their names
POST   /v1/adapters                   pushes an adapter from a folder of the server or a URI
PUT    /v1/adapters/NAME/files        pushes the files in the body, a tar of config, weights and tokenizer
PUT    /v1/adapters/NAME/tensors      pushes the tensors in the body (adapter_formats/tensor_push.py)
GET    /v1/adapters/NAME              shows versions, aliases with their history, and pins
DELETE /v1/adapters/NAME              removes the adapter; with ?alias= it removes only that alias
POST   /v1/adapters/NAME/download     sends the files of one version (download_api.py)
POST   /v1/adapters/NAME/VERB         runs alias, rollback, pin, unpin, prefetch or verify
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, TypeVar, get_args

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import Caller, caller_of
from lorafleet.api.access.visibility import check_source
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.body_fields import ModelName
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.message_models import AnswerModels, request_model
from lorafleet.api.request.parsing import parse_json, parse_object, parse_query, read_body
from lorafleet.api.routes.build_api import Handler, Route
from lorafleet.api.routes.operations import Body, TarFile, TensorBytes, describe
from lorafleet.cluster.admin.download_api import download_route
from lorafleet.cluster.admin.push_limits import limited_for_owner
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.upload_tar import unpacked
from lorafleet.cluster.admin.upload_tensors import read_announced, received
from lorafleet.cluster.receiving.group_orders import GroupPush
from lorafleet.protocol import admin_verbs as verbs
from lorafleet.protocol import limits
from lorafleet.protocol.admin_answers import (
    Adapter,
    AdapterPage,
    Alias,
    Move,
    Prefetched,
    PushedVersion,
    Removed,
    Verified,
    Version,
)
from lorafleet.protocol.admin_verbs import RECEIVE_S, REMOVE_S, HttpVerb, PushAdapter, Verb, route_of
from lorafleet.protocol.errors import Forbidden, InvalidRequest
from lorafleet.protocol.names import bare_name, check_adapter_name, check_tenant, full_name, tenant_of

logger = logging.getLogger("lorafleet.http")

Administer = Callable[[AppState, Request], Awaitable[msgspec.Struct]]
AdministerT = TypeVar("AdministerT", bound=Callable[..., Awaitable[msgspec.Struct]])


class UploadQuery(Strict):
    options: Annotated[str, AtMost(limits.MAX_OPTIONS_CHARS)] = "{}"  # PushOptions as JSON.
    source: Annotated[str, AtMost(limits.MAX_PATH_CHARS)] = "upload"


class TensorsQuery(Strict):
    options: Annotated[str, AtMost(limits.MAX_OPTIONS_CHARS)] = "{}"  # PushOptions as JSON.
    source: Annotated[str, AtMost(limits.MAX_PATH_CHARS)] = "memory"
    # A process group or a GPU from which the tensors come, if they are not in the body.
    group: Annotated[str, AtMost(limits.MAX_GROUP_NAME_CHARS)] | None = None
    device: Annotated[str, AtMost(limits.MAX_DEVICE_CHARS)] | None = None
    timeout_s: Annotated[float, Within(limits.RECEIVE_S)] = RECEIVE_S  # Time for the broadcasts of a group.


class RemoveQuery(Strict):
    alias: ModelName | None = None  # If it is given, only this alias is removed.
    wait_s: Annotated[float, Within(limits.REMOVE_WAIT_S)] = REMOVE_S


# The names of these answers' schemas in /openapi.json, from which clients are generated.
ANSWERS = AnswerModels({Adapter: "ShownAdapter", Version: "ShownVersion", Alias: "ShownAlias", Move: "ShownMove"})
PUSH_OPTIONS = request_model(verbs.PushOptions, "PushOptions")
PUSH_REQUEST = request_model(PushAdapter, "PushRequest")


def admin_routes(admin: AdapterAdmin) -> list[Route]:
    api = _AdminApi(admin)
    special: dict[object, Administer] = {
        PushAdapter: api.push,
        verbs.UploadAdapter: api.upload,
        verbs.UploadTensors: api.upload_tensors,
        verbs.RemoveAdapter: api.remove,
    }
    routes: list[Route] = [download_route(admin)]
    for kind in get_args(HttpVerb):
        # RemoveAdapter's route is also that of RemoveAlias.
        if kind not in (verbs.RemoveAlias, verbs.DownloadAdapter):
            route, handler = route_of(kind), special.get(kind) or api.handler(kind)
            routes.append((route.method, route.path.replace("{name}", "{name:path}"), "admin", _logged(handler)))
    # The first route that matches the path answers a wrong method with a 405, and `{name}` alone matches every path.
    return sorted(routes, key=lambda entry: entry[1].endswith(":path}"))


def _describe(
    kind: type[Verb[object]],
    body: Body = None,
    query: type[BaseModel] | None = None,
    answer: object = None,
) -> Callable[[AdministerT], AdministerT]:
    """Describes a handler by its verb, whose answer has one type unless `answer` is given."""
    answer = answer or ANSWERS.model(kind.answer_type())
    return describe(route_of(kind).summary, body=body, query=query, answer=answer)


def _model(kind: type[Verb[object]]) -> type[Strict] | None:
    """Returns the model of the fields that are not in the path, or None if there are none to send."""
    route = route_of(kind)
    return request_model(kind, route.schema, route.in_path, route.about) if route.schema else None


def _logged(handler: Administer) -> Handler:
    @wraps(handler)  # This also copies the description from @describe.
    async def logged(front: AppState, request: Request) -> Response:
        answer = await handler(front, request)
        if request.method != "GET":
            logger.info("admin: %s %s", request.method, request.url.path)
        return json_response(_seen_by(caller_of(request), answer))

    return logged


class _AdminApi:
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    def handler(self, kind: type[Verb[msgspec.Struct]]) -> Administer:
        """Makes the handler of a verb that the directory carries out as it is."""
        model, in_query = _model(kind), route_of(kind).method == "GET"

        @_describe(kind, body=None if in_query else model, query=model if in_query else None)
        async def handle(front: AppState, request: Request) -> msgspec.Struct:
            fields: dict[str, object] = {}
            if model is not None:
                checked = parse_query(request, model) if in_query else await read_body(front, request, model)
                fields = checked.model_dump()
            verb = msgspec.convert(fields | request.path_params, kind)
            if isinstance(verb, verbs.PinAdapter | verbs.UnpinAdapter):
                _check_may_pin(request)
            verb = _with_full_names(front, request, verb)
            verb.check()
            await begin(request, **fields)
            return await self._admin.administer(verb)

        return handle

    @_describe(PushAdapter, body=PUSH_REQUEST)
    async def push(self, front: AppState, request: Request) -> Adapter:
        verb = msgspec.convert((await read_body(front, request, PUSH_REQUEST)).model_dump(), PushAdapter)
        await begin(request, name=verb.name, source=verb.source, tenant=verb.tenant)
        within = await check_source(front.access.tenants, caller_of(request), verb.source)
        return await self._push(front, request, verb, verb.source, within)

    @_describe(verbs.UploadAdapter, body=TarFile, query=UploadQuery)
    async def upload(self, front: AppState, request: Request) -> Adapter:
        verb = await _begin_upload(request, parse_query(request, UploadQuery))
        full = _pushed_name(front, request, verb.name, verb.tenant)
        async with unpacked(request, self._admin, full) as folder:
            return await self._push(front, request, verb, str(folder))

    @_describe(verbs.UploadTensors, body=TensorBytes, query=TensorsQuery)
    async def upload_tensors(self, front: AppState, request: Request) -> PushedVersion:
        query = parse_query(request, TensorsQuery)
        if query.group is not None or query.device is not None:
            _check_may_receive(request, query)
        verb = await _begin_upload(request, query)
        full = _pushed_name(front, request, verb.name, verb.tenant)
        terms = self._terms(front, request, verb, full)
        self._admin.check_name(full)
        digest, adapter = await self._push_tensors(request, query, full, terms)
        if verb.pin is not None:
            await self._admin.administer(verbs.PinAdapter(full, verb.pin))
        version = next(version.number for version in adapter.versions if version.digest == digest)
        return PushedVersion(full, "adapter.version", version, digest)

    async def _push_tensors(
        self, request: Request, query: TensorsQuery, full: str, terms: verbs.PushTerms
    ) -> tuple[str, Adapter]:
        """Pushes the tensors from wherever the query says. Returns the version's digest besides."""
        admin = self._admin
        if query.group is None and query.device is None:
            async with received(request, admin.tensor_budget, admin.take_in) as intake:
                return await admin.push_taken_in(full, intake, terms)
        push = await read_announced(request, from_device=query.device is not None)
        if query.device is not None:
            return await admin.push_from_device(full, query.device, push, terms)
        assert query.group is not None
        done = await admin.order_group(GroupPush(query.group, full, push, terms, query.timeout_s))
        assert done.adapter is not None, "a push is answered with its adapter"
        return done.digest, done.adapter

    @_describe(verbs.RemoveAdapter, query=RemoveQuery, answer=ANSWERS.model(Adapter) | ANSWERS.model(Removed))
    async def remove(self, front: AppState, request: Request) -> Adapter | Removed:
        query, name = parse_query(request, RemoveQuery), _name(front, request)
        await begin(request)
        if query.alias is None:
            return await self._admin.administer(verbs.RemoveAdapter(name, query.wait_s))
        alias = _alias_name(front, request, query.alias)
        return await self._admin.administer(verbs.RemoveAlias(name, alias))

    async def _push(
        self, front: AppState, request: Request, verb: PushAdapter, path: str, within: str | None = None
    ) -> Adapter:
        """Pushes the files at the path. They are those of verb.source, or an upload that came from there."""
        full = _pushed_name(front, request, verb.name, verb.tenant)
        adapter = await self._admin.push_folder(full, path, self._terms(front, request, verb, full), within)
        return adapter if verb.pin is None else await self._admin.administer(verbs.PinAdapter(full, verb.pin))

    @staticmethod
    def _terms(front: AppState, request: Request, verb: PushAdapter, full: str) -> verbs.PushTerms:
        """Returns the terms of a push under this full name. Raises Forbidden if the caller may not pin."""
        if verb.pin is not None:
            _check_may_pin(request)
        terms = verbs.PushTerms(
            verb.source,
            activate=verb.activate,
            num_replicas=verb.replicas,
            base_model_name=verb.base_model_name,
            metadata=verb.metadata,
            in_flight=verb.in_flight,
        )
        return limited_for_owner(terms, front, full)


async def _begin_upload(request: Request, query: UploadQuery | TensorsQuery) -> PushAdapter:
    """Reads the options of an upload, and records that it is about to act."""
    options = parse_object(parse_json(query.options.encode()), PUSH_OPTIONS, "options.").model_dump()
    name = str(request.path_params["name"])
    verb = msgspec.convert({**options, "name": name, "source": query.source}, PushAdapter)
    await begin(request, name=name, source=verb.source, tenant=verb.tenant)
    return verb


def _with_full_names(front: AppState, request: Request, verb: Verb[msgspec.Struct]) -> Verb[msgspec.Struct]:
    """Returns the message with full names in place of the caller's own names."""
    match verb:
        case verbs.ListAdapters(after, limit):
            tenant = caller_of(request).tenant
            return verb if tenant is None else verbs.ListOwned(full_name(tenant, after), limit, tenant)
        case verbs.MoveAlias(alias=str(alias)) | verbs.RollBackAlias(alias=str(alias)):
            alias = _alias_name(front, request, alias)
            return msgspec.structs.replace(verb, name=_name(front, request), alias=alias)
        case _:
            return msgspec.structs.replace(verb, name=_name(front, request))


def _seen_by(caller: Caller, answer: msgspec.Struct) -> msgspec.Struct:
    """Returns the answer as the caller may see it. A tenant sees bare names, the operator sees full names."""
    if caller.tenant is None:
        return answer
    match answer:
        case AdapterPage(data=data, last_id=last_id):
            return msgspec.structs.replace(
                answer,
                data=[_seen_by(caller, adapter) for adapter in data],
                last_id=None if last_id is None else bare_name(last_id),
            )
        case Adapter(aliases=aliases):
            bare = {bare_name(alias): shares for alias, shares in aliases.items()}
            return msgspec.structs.replace(answer, id=bare_name(answer.id), aliases=bare)
        case Removed(id=name) | Prefetched(id=name) | Verified(id=name) | PushedVersion(id=name):
            return msgspec.structs.replace(answer, id=bare_name(name))
        case _:
            raise AssertionError(answer)


def _name(front: AppState, request: Request) -> str:
    """Returns the full name of the adapter that the request's path names."""
    return front.models.catalog_of(caller_of(request)).to_change(str(request.path_params["name"]))


def _alias_name(front: AppState, request: Request, alias: str) -> str:
    """Returns the alias's full name. It is in the namespace of the adapter itself, also if the operator moves the alias
    of a tenant."""
    check_adapter_name(bare_name(alias))
    return full_name(tenant_of(_name(front, request)), bare_name(alias))


def _pushed_name(front: AppState, request: Request, name: str, tenant: str | None) -> str:
    """Returns the full name of a pushed adapter. Raises Forbidden if the caller may not push for `tenant`."""
    caller = caller_of(request)
    if tenant is None or front.access.tenants.id_of_tenant(tenant) == caller.tenant:
        return front.models.catalog_of(caller).to_change(name)
    if not caller.is_operator:
        raise Forbidden(
            f"The API key {caller.key_id!r} belongs to tenant {caller.tenant!r}; it cannot push for {tenant!r}."
        )
    check_tenant(tenant)
    return full_name(front.access.tenants.id_of_tenant(tenant), name)


def _check_may_receive(request: Request, query: TensorsQuery) -> None:
    """Raises Forbidden unless the operator calls, since the replica opens memory or connections of its node for it, and
    InvalidRequest if the query names both a group and a device."""
    if not caller_of(request).is_operator:
        raise Forbidden(
            "Tensors from a process group or a GPU require the operator's key, which belongs to no tenant. Send them "
            "in the body."
        )
    if query.group is not None and query.device is not None:
        raise InvalidRequest("Give either `group` or `device`; the tensors come from one place.", "group")


def _check_may_pin(request: Request) -> None:
    """Raises Forbidden unless the operator calls, since a pinned adapter takes a slot from all tenants."""
    if not caller_of(request).is_operator:
        raise Forbidden(
            "Pinning takes slots from all tenants: it requires the operator's key, which belongs to no tenant."
        )

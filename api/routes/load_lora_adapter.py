"""Serves vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's wording, because clients match on it,
and SGLang's routes of the same names without /v1.

The catalog applies the changes on every replica.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.runtime_changes import check_may_load
from lorafleet.api.access.visibility import CallersCatalog
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.trainer_bodies import (
    LoadAdapterRequest,
    SGLangLoadRequest,
    SGLangUnloadRequest,
    UnloadAdapterRequest,
)
from lorafleet.api.routes.operations import PlainText, describe
from lorafleet.protocol.errors import AdapterExists, InvalidRequest, ModelNotFound

logger = logging.getLogger("lorafleet.http")


@describe("Load an adapter, as in vLLM", body=LoadAdapterRequest, answer=PlainText)
async def load_lora_adapter(state: AppState, request: Request) -> Response:
    check_may_load(state, caller_of(request))
    body = await read_body(state, request, LoadAdapterRequest)
    name, path = body.lora_name, body.lora_path
    if not name or not path:
        missing = "lora_path" if name else "lora_name"
        raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", missing)
    await begin(request, name=name, source=path)
    try:
        await state.models.catalog_of(caller_of(request)).add(name, path, load_inplace=bool(body.load_inplace))
    except AdapterExists:
        raise AdapterExists(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True.",
            "lora_name",
        ) from None
    logger.info("adapter %s loaded from %s", name, path)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@describe("Unload an adapter, as in vLLM", body=UnloadAdapterRequest, answer=PlainText)
async def unload_lora_adapter(state: AppState, request: Request) -> Response:
    check_may_load(state, caller_of(request))
    body = await read_body(state, request, UnloadAdapterRequest)
    name = body.lora_name
    if not name:
        raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    await begin(request, name=name)
    try:
        catalog = state.models.catalog_of(caller_of(request))
        await _check_number(catalog, name, body.lora_int_id)
        await catalog.remove(name)
    except ModelNotFound:
        raise ModelNotFound(f"The lora adapter '{name}' cannot be found.", "lora_name") from None
    logger.info("adapter %s unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@describe("Load an adapter, as in SGLang", body=SGLangLoadRequest, answer=server_types.LoadedAdapters)
async def load_sglang_adapter(state: AppState, request: Request) -> Response:
    check_may_load(state, caller_of(request))
    body = await read_body(state, request, SGLangLoadRequest)
    await begin(request, name=body.lora_name, source=body.lora_path)
    catalog = state.models.catalog_of(caller_of(request))
    await catalog.add(body.lora_name, body.lora_path, load_inplace=body.load_inplace)
    logger.info("adapter %s loaded from %s", body.lora_name, body.lora_path)
    return json_response({"success": True, "error_message": "", "loaded_adapters": {body.lora_name: body.lora_path}})


@describe("Unload an adapter, as in SGLang", body=SGLangUnloadRequest, answer=server_types.LoadedAdapters)
async def unload_sglang_adapter(state: AppState, request: Request) -> Response:
    check_may_load(state, caller_of(request))
    body = await read_body(state, request, SGLangUnloadRequest)
    await begin(request, name=body.lora_name)
    await state.models.catalog_of(caller_of(request)).remove(body.lora_name)
    logger.info("adapter %s unloaded", body.lora_name)
    return json_response({"success": True, "error_message": "", "loaded_adapters": {}})


async def _check_number(catalog: CallersCatalog, name: str, number: int | None) -> None:
    """Raises ModelNotFound if the client gives a number that is not the number of the adapter with this name."""
    known = None if number is None else await catalog.known(name)
    if number is not None and (known is None or known.lora_int_id != number):
        raise ModelNotFound(name)

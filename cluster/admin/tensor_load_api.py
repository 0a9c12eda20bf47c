"""Serves SGLang's /load_lora_adapter_from_tensors, whose body has an adapter's tensors as base64.

The body is bounded by --max-body-bytes. PUT /v1/adapters/NAME/tensors (admin_api.py) takes larger adapters, without
base64.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.runtime_changes import check_may_load
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.trainer_bodies import TensorLoadRequest
from lorafleet.api.routes.operations import describe
from lorafleet.cluster.admin.push_limits import limited_for_owner
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.protocol.adapter_formats.serialized_tensors import read_serialized
from lorafleet.protocol.admin_verbs import PushTerms

PLACE = "__tensor__"  # SGLang's word for the place of an adapter that came from memory.

logger = logging.getLogger("lorafleet.http")


class TensorLoadApi:
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    @describe(
        "Load an adapter from tensors in the body, as in SGLang",
        body=TensorLoadRequest,
        answer=server_types.LoadedAdapters,
    )
    async def load_from_tensors(self, state: AppState, request: Request) -> Response:
        caller = caller_of(request)
        check_may_load(state, caller)
        body = await read_body(state, request, TensorLoadRequest)
        name = body.lora_name
        await begin(request, name=name, source="memory")
        full = state.models.catalog_of(caller).to_change(name)
        terms = limited_for_owner(PushTerms("memory", num_replicas=None), state, full)
        copies, load_format = body.serialized_named_tensors, body.load_format or "safetensors"
        await self._admin.push_tensors(
            full, lambda: read_serialized(copies, load_format, body.config_dict, body.expected_checksums), terms
        )
        logger.info("adapter %s loaded from tensors in the body", name)
        return json_response({"success": True, "error_message": "", "loaded_adapters": {name: PLACE}})

"""/v1/models and /v1/models/{id}: the base model under each of its names, then every adapter."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.workers.lora.request import LoRARequest
from lorafleet.workers.openai import answers
from lorafleet.workers.openai.caller import caller_of
from lorafleet.workers.openai.front import Front
from lorafleet.workers.openai.operations import describe
from lorafleet.workers.openai.responses import json_response
from lorafleet.workers.structured.spec import as_response_format


@describe("The base model and the adapters", answer=answers.ModelList)
async def list_models(front: Front, request: Request) -> Response:
    bases = [_base_card(front, name) for name in front.config.served_model_names]
    entries = await front.catalog_of(caller_of(request)).entries()
    adapters = [_adapter_card(front, lora, name) for name, lora in entries]
    return json_response({"object": "list", "data": bases + adapters})


@describe("One model", answer=answers.ModelCard)
async def show_model(front: Front, request: Request) -> Response:
    """Any name that a request could give, listed or not."""
    model = await front.model(caller_of(request), request.path_params["model"])
    if model.lora is None:
        return json_response(_base_card(front, model.name))
    default = model.language.structured_outputs
    shown = {} if default is None else {"default_response_format": as_response_format(default)}
    return json_response(_adapter_card(front, model.lora, model.name) | shown)


def _base_card(front: Front, name: str) -> dict[str, object]:
    return _card(front, name, front.config.model_path, None)


def _adapter_card(front: Front, lora: LoRARequest, name: str) -> dict[str, object]:
    return _card(front, name, lora.lora_path, lora.base_model_name or front.config.base_id)


def _card(front: Front, name: str, root: str, parent: str | None) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": front.config.created,
        "owned_by": "lorafleet",
        "root": root,
        "parent": parent,
        "max_model_len": front.max_model_len,
    }

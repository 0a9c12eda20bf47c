"""Serves /v1/models and /v1/models/{id}, and SGLang's /model_info.

The list has the base model under each of its names, and then every adapter that the caller may use.
"""

from __future__ import annotations

import os
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import Caller, caller_of
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import encode_json, json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.routes.operations import describe
from lorafleet.protocol.limits import MAX_MODEL_CHARS, MAX_MODELS, Range
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.structured_spec import as_response_format

HUB = "hf://"


class ModelQuery(Strict):
    """The query of a page, as in other lists of OpenAI."""

    limit: Annotated[int, Within(Range(1, MAX_MODELS))] = MAX_MODELS
    after: Annotated[str, AtMost(MAX_MODEL_CHARS)] = ""  # ID of the last model on the previous page.


@describe(
    "List the base model, then the adapters by name, page by page", query=ModelQuery, answer=server_types.ModelList
)
async def list_models(state: AppState, request: Request) -> Response:
    query, caller = parse_query(request, ModelQuery), caller_of(request)
    key = (caller.tenant, caller.is_operator, query.after, query.limit)
    page = await state.model_pages.get(key, state.models.catalog.list_version, lambda: _page(state, caller, query))
    return Response(page, media_type="application/json")


async def _page(state: AppState, caller: Caller, query: ModelQuery) -> bytes:
    names = state.config.served_model_names
    is_base = query.after in names
    bases = names[names.index(query.after) + 1 :] if is_base else () if query.after else names
    cards = [_base_card(state, caller, name) for name in bases[: query.limit]]
    has_more = len(bases) > query.limit
    if not has_more:
        after = "" if is_base else query.after
        entries, has_more = await state.models.catalog_of(caller).listed(after, query.limit - len(cards))
        cards += [_adapter_card(state, caller, lora, name) for name, lora in entries]
    ids = [card["id"] for card in cards]
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    return encode_json(
        {"object": "list", "data": cards, "has_more": has_more, "first_id": first_id, "last_id": last_id}
    )


@describe("Show a model", answer=server_types.ModelCard)
async def show_model(state: AppState, request: Request) -> Response:
    """Shows any model that a request could name, listed or not."""
    model = await state.models.find(caller_of(request), request.path_params["model"])
    caller = caller_of(request)
    if model.lora is None:
        return json_response(_base_card(state, caller, model.name))
    default = model.language.structured_outputs
    shown = {} if default is None else {"default_response_format": as_response_format(default)}
    return json_response(_adapter_card(state, caller, model.lora, model.name) | shown)


@describe("Show the base model, as in SGLang", answer=server_types.ModelInfo)
async def model_info(state: AppState, request: Request) -> Response:
    root = _root(state, caller_of(request), state.config.model_path, state.config.base_id)
    return json_response(
        {
            "model_path": root,
            "tokenizer_path": root,
            "served_model_name": state.config.base_id,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",  # SGLang's word for base weights that were never updated.
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


def _base_card(state: AppState, caller: Caller, name: str) -> dict[str, object]:
    root = _root(state, caller, state.config.model_path, state.config.base_id)
    return _card(state, name, root, None, state.texts.base_max_model_len)


def _adapter_card(state: AppState, caller: Caller, lora: LoRARequest, name: str) -> dict[str, object]:
    origin = lora.origin or lora.lora_path
    root = name if origin == lora.lora_name else _root(state, caller, origin, name)
    length = state.texts.listed_max_model_len(lora)
    card = _card(state, name, root, lora.base_model_name or state.config.base_id, length)
    return card | ({"left_out": lora.left_out} if lora.left_out else {})


def _root(state: AppState, caller: Caller, path: str, name: str) -> str:
    """Returns the model's path to callers that may see the server's folders and buckets, else its hub ID or name."""
    is_public = path.startswith(HUB) or not (os.path.isabs(path) or "://" in path)
    return path if is_public or state.access.shows_paths_to(caller) else name


def _card(state: AppState, name: str, root: str, parent: str | None, max_model_len: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.config.created,
        "owned_by": "lorafleet",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }

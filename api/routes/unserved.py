"""Answers the routes by which trainers change a server's base weights, which this server never does.

Each is rejected with the remedy, because a plain 404 does not say what to change in a trainer's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.app_state import AppState
from lorafleet.api.routes.operations import describe
from lorafleet.protocol.errors import UnsupportedRoute

if TYPE_CHECKING:
    from lorafleet.api.routes.build_api import Handler, Route

_WEIGHTS = (
    "the base model's weights do not change while this server runs. Train a LoRA adapter and load it instead: "
    "PUT /v1/adapters/NAME/tensors, POST /load_lora_adapter_from_tensors, /load_lora_adapter_from_distributed, "
    "/v1/load_lora_adapter or /load_lora_adapter. "
    "For full weights, merge them into a checkpoint and start a server with it."
)
_REMEDIES: Mapping[str, str] = {
    # SGLang
    "/update_weights_from_disk": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    # vLLM
    "/init_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/collective_rpc": _WEIGHTS,
    # What AReaL, prime-rl, ART and SkyRL add to vLLM.
    "/areal_init_weights_update_group": _WEIGHTS,
    "/areal_set_update_weight_meta": _WEIGHTS,
    "/areal_set_update_weight_meta_lora": _WEIGHTS,
    "/areal_update_weights": _WEIGHTS,
    "/areal_update_weights_xccl": _WEIGHTS,
    "/areal_update_weights_lora_xccl": _WEIGHTS,
    "/init_broadcaster": _WEIGHTS,
    "/art/set_served_model_name": _WEIGHTS,
    "/skyrl/v1/generate": (
        "this route of SkyRL's own is not served. Set SkyRL's `enable_return_routed_experts` to false, and it calls "
        "/inference/v1/generate, which returns the experts if a request has `return_routed_experts`."
    ),
}


def unserved_routes() -> list[Route]:
    return [("POST", path, "open", _refuse(path, remedy)) for path, remedy in _REMEDIES.items()]


def _refuse(path: str, remedy: str) -> Handler:
    @describe("Always rejected, with what to do instead")
    async def refuse(_: AppState, __: Request) -> Response:
        raise UnsupportedRoute(f"POST {path} is not served: {remedy}")

    return refuse

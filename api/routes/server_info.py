"""Serves what trainers ask of a server before they push to it: vLLM's /server_info and /get_world_size."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.runtime_changes import check_may_load
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.request.trainer_bodies import ServerInfoQuery, WorldSizeQuery
from lorafleet.api.routes.operations import describe


@describe("Show the server's configuration, as in vLLM", query=ServerInfoQuery, answer=server_types.ServerInfo)
async def server_info(state: AppState, request: Request) -> Response:
    query = parse_query(request, ServerInfoQuery)
    check_may_load(state, caller_of(request))
    config = _vllm_config(state)
    return json_response({"vllm_config": config if query.config_format == "json" else str(config)})


@describe("Show the number of ranks of a replica, as in vLLM", query=WorldSizeQuery, answer=server_types.WorldSize)
async def get_world_size(state: AppState, request: Request) -> Response:
    parse_query(request, WorldSizeQuery)
    check_may_load(state, caller_of(request))
    return json_response({"world_size": state.engine.hello.tensor_parallel_size})


def _vllm_config(state: AppState) -> dict[str, object]:
    """Returns vLLM's names of what it and this server have in common.

    There is one data-parallel rank, however many replicas there are: trainers ask because vLLM loads an adapter on the
    rank that answers, and here a load reaches all replicas.
    """
    hello, ranks = state.engine.hello, state.engine.hello.tensor_parallel_size
    return {
        "model_config": {
            "model": state.config.base_id,
            "served_model_name": list(state.config.served_model_names),
            "max_model_len": hello.max_model_len,
            "dtype": f"torch.{hello.dtype}",
            "logprobs_mode": hello.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": ranks,
        },
        "lora_config": None if hello.lora is None else msgspec.to_builtins(hello.lora),
        "weight_transfer_config": None,
    }

"""Serves /v1/embeddings of texts and token IDs, with the base model or an adapter.

An embedding is pooled from the hidden states after the last norm, and has length 1 unless the request disables this.
"""

from __future__ import annotations

import base64

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.answer import answer_types
from lorafleet.api.answer.envelope import draw_key, request_id
from lorafleet.api.answer.generation import Sample, Task, collect, fallback_of, make_samples
from lorafleet.api.answer.responses import WholeReply, json_response
from lorafleet.api.answer.streaming import fallback_headers
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.priority import checked_priority
from lorafleet.api.request.prompts import Prompt, fit_max_tokens, listed_prompts, read_prompt, truncate
from lorafleet.api.request.request_bodies import EmbeddingRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.api.text_service import TextService
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.messages import Pooling
from lorafleet.protocol.sampling_params import SamplingParams

_NO_ANSWER = SamplingParams(temperature=0.0, max_tokens=1)


@describe("Embeddings", body=EmbeddingRequest, answer=answer_types.Embeddings, headers=STARTING)
async def embeddings(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, EmbeddingRequest)
    size = state.engine.hello.hidden_size
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        raise InvalidRequest(
            f"`dimensions` is {body.dimensions}; this model's embeddings have {size} dimensions. Give a number from 1 "
            f"to {size}.",
            "dimensions",
        )
    caller = caller_of(request)
    priority = checked_priority(state.access.gate, caller, body.priority)
    async with deadline.while_finding_models(trace_of(request)):
        model = await state.models.find(caller, body.model, draw_key(request, body.request_id, None), body.lora_weights)
    label_request(request.scope, state.telemetry.metrics.label(model.lora))
    pooling: Pooling = state.config.pooling if body.pooling is None else body.pooling
    tasks = [
        Task(prompt, model, _NO_ANSWER, cache_salt=body.cache_salt, priority=priority, pooling=pooling)
        for prompt in await _read_prompts(state.texts, model, body)
    ]
    samples = await make_samples(state, request, request_id(request, "embd-", body.request_id), tasks, deadline)
    return WholeReply(lambda: _answer(state, body, samples))


async def _read_prompts(texts: TextService, model: ServedModel, body: EmbeddingRequest) -> list[Prompt]:
    special, keep = body.add_special_tokens is not False, body.truncate_prompt_tokens
    prompts: list[Prompt] = []
    async for given in in_turns(listed_prompts(body.input, "input")):
        prompt = await read_prompt(
            texts, model, given, add_special_tokens=special, param="input", must_fit=keep is None
        )
        prompt = truncate(texts, prompt, keep, 1)
        fit_max_tokens(texts, len(prompt.token_ids), 1, None, "input")
        prompts.append(prompt)
    return prompts


async def _answer(state: AppState, body: EmbeddingRequest, samples: list[Sample]) -> Response:
    deltas = await collect(samples)
    num_values = sum(len(delta.embedding) // 4 for delta in deltas)
    return await run_by_count(
        state.long_work, samples[0].model, num_values, lambda: _write(state, body, samples, deltas)
    )


def _write(state: AppState, body: EmbeddingRequest, samples: list[Sample], deltas: list[Delta]) -> Response:
    data = [
        {"object": "embedding", "index": sample.index, "embedding": _written(body, delta.embedding)}
        for sample, delta in zip(samples, deltas, strict=True)
    ]
    num_tokens = sum(len(sample.prompt.token_ids) for sample in samples)
    fallback = fallback_of(samples)
    content = {
        "object": "list",
        "data": data,
        "model": samples[0].model.name if fallback is None else state.config.base_id,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        **({} if fallback is None else {"lora_fallback": fallback}),
    }
    return json_response(content, fallback_headers(samples))


def _written(body: EmbeddingRequest, raw: bytes) -> msgspec.Raw | str:
    vector_D = np.frombuffer(raw, np.float32)[: body.dimensions]
    if body.normalize is not False:
        vector_D = vector_D / max(float(np.linalg.norm(vector_D)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(vector_D.tolist()))

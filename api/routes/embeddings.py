"""Serves /v1/embeddings and vLLM's /pooling of texts and token IDs, with the base model or an adapter.

An embedding is pooled from the hidden states after the last norm, and has length 1 unless the request disables this.
/pooling also returns the outputs of an adapter's own head, for the last token or for every token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.answer import pooling_types
from lorafleet.api.answer.generation import Sample
from lorafleet.api.answer.pooled_work import PooledWork, Values, activated, check_head_values, vector_of
from lorafleet.api.answer.responses import WholeReply
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.pooled_bodies import EmbeddingRequest, PoolingRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.text.output import Delta
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.messages import HeadTask


@describe("Embeddings", body=EmbeddingRequest, answer=pooling_types.Embeddings, headers=STARTING)
async def embeddings(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, EmbeddingRequest)
    _check_dimensions(state, body)
    work = await PooledWork.begin(state, request, body, "embd-", deadline)
    samples = await work.start(await work.read(body.input, "input"), body.pooling or state.config.pooling)

    def write(deltas: list[Delta]) -> dict[str, object]:
        data = [
            {"object": "embedding", "index": i, "embedding": _written(_embedding(body, delta), body.encoding_format)}
            for i, delta in enumerate(deltas)
        ]
        num_tokens = sum(len(sample.prompt.token_ids) for sample in samples)
        return {
            "object": "list",
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    return WholeReply(lambda: work.answer(samples, write))


@describe(
    "Embeddings, or the outputs of an adapter's head",
    body=PoolingRequest,
    answer=pooling_types.PooledList,
    headers=STARTING,
)
async def pooling(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, PoolingRequest)
    _check_dimensions(state, body)
    work = await PooledWork.begin(state, request, body, "pool-", deadline)
    head = work.model.language.classifier
    task = body.task or (None if head is None else head.task)
    if task is None:
        raise InvalidRequest(
            f"`task` must be given, since {work.model.name!r} has no classification head. Set it to 'embed'.", "task"
        )
    if task != "embed":
        return await _pool_by_head(work, body, task)
    if body.use_activation is not None:
        raise InvalidRequest("`use_activation` does not apply to the task 'embed'; leave it out.", "use_activation")
    samples = await work.start(await work.read(body.input, "input"), body.pooling or state.config.pooling)
    return _pooled(work, body, samples, lambda delta: _embedding(body, delta))


async def _pool_by_head(work: PooledWork, body: PoolingRequest, task: HeadTask) -> Response:
    of_embeddings = {"dimensions": body.dimensions, "normalize": body.normalize, "pooling": body.pooling}
    for name, value in of_embeddings.items():
        if value is not None:
            raise InvalidRequest(f"`{name}` does not apply to the task {task!r}; leave it out.", name)
    head = work.head(task)
    prompts = await work.read(body.input, "input")
    check_head_values(prompts, head, "input")
    samples = await work.start(prompts, task)

    def values(delta: Delta) -> Values:
        values_TL = activated(head, delta, body.use_activation)
        return values_TL[0] if task == "classify" else values_TL

    return _pooled(work, body, samples, values)


def _pooled(
    work: PooledWork, body: PoolingRequest, samples: list[Sample], values: Callable[[Delta], Values]
) -> Response:
    def write(deltas: list[Delta]) -> dict[str, object]:
        return work.listed(
            [
                {"object": "pooling", "index": i, "data": _written(values(delta), body.encoding_format)}
                for i, delta in enumerate(deltas)
            ]
        )

    return WholeReply(lambda: work.answer(samples, write))


def _check_dimensions(state: AppState, body: EmbeddingRequest) -> None:
    size = state.engine.hello.hidden_size
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        raise InvalidRequest(
            f"`dimensions` is {body.dimensions}; this model's embeddings have {size} dimensions. Give a number from 1 "
            f"to {size}.",
            "dimensions",
        )


def _embedding(body: EmbeddingRequest, delta: Delta) -> Values:
    vector_D = vector_of(delta)[: body.dimensions]
    return vector_D if body.normalize is False else vector_D / max(float(np.linalg.norm(vector_D)), 1e-12)


def _written(values: Values, encoding_format: str | None) -> msgspec.Raw | str:
    if encoding_format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(values.tolist()))

"""Serves the route /classify of vLLM: the classes of texts by the head of an adapter with task type SEQ_CLS."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.answer import pooling_types
from lorafleet.api.answer.pooled_work import PooledWork, activated, check_head_values
from lorafleet.api.answer.responses import WholeReply
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.pooled_bodies import ClassifyRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.text.output import Delta


@describe("Classes of texts", body=ClassifyRequest, answer=pooling_types.Classes, headers=STARTING)
async def classify(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, ClassifyRequest)
    work = await PooledWork.begin(state, request, body, "classify-", deadline)
    head = work.head("classify")
    prompts = await work.read(body.input, "input")
    check_head_values(prompts, head, "input")
    samples = await work.start(prompts, "classify")

    def write(deltas: list[Delta]) -> dict[str, object]:
        entries: list[dict[str, object]] = []
        for i, delta in enumerate(deltas):
            [probs_L] = activated(head, delta, body.use_activation)
            label = head.labels[int(probs_L.argmax())]
            entries.append({"index": i, "label": label, "probs": probs_L.tolist(), "num_classes": len(probs_L)})
        return work.listed(entries)

    return WholeReply(lambda: work.answer(samples, write))

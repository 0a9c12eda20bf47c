"""Runs a request whose prompts get vectors in place of tokens: embeddings, or the outputs of an adapter's head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.body_budget import body_bytes_of
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.answer.envelope import draw_key, request_id
from lorafleet.api.answer.generation import Sample, Task, collect, fallback_of, make_samples, usage_of
from lorafleet.api.answer.responses import json_response
from lorafleet.api.answer.streaming import answer_headers
from lorafleet.api.app_state import AppState
from lorafleet.api.request.pooled_bodies import PooledRequest
from lorafleet.api.request.priority import checked_priority
from lorafleet.api.request.prompts import Prompt, PromptTotal, fit_max_tokens, listed_prompts, read_prompt, truncate
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.protocol.adapter_formats.adapter_classifier import AdapterClassifier
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_HEAD_VALUES
from lorafleet.protocol.messages import HeadTask, Pooling
from lorafleet.protocol.sampling_params import SamplingParams

Values = np.ndarray[Any, np.dtype[np.float32]]

_NO_ANSWER = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class PooledWork:
    """One request, whose model has been found."""

    state: AppState
    request: Request
    body: PooledRequest
    model: ServedModel
    id: str
    deadline: RequestDeadline
    priority: int

    @classmethod
    async def begin(
        cls, state: AppState, request: Request, body: PooledRequest, prefix: str, deadline: RequestDeadline
    ) -> PooledWork:
        """Finds the model that the body names. `prefix` is that of the request's ID."""
        caller = caller_of(request)
        priority = checked_priority(state.access.gate, caller, body.priority)
        key = draw_key(request, body.request_id, None)
        async with deadline.while_finding_models(trace_of(request)):
            model = await state.models.find(caller, body.model, key, body.lora_weights)
        label_request(request.scope, state.telemetry.metrics.label(model.lora))
        return cls(state, request, body, model, request_id(request, prefix, body.request_id), deadline, priority)

    async def read(self, given: object, param: str) -> list[Prompt]:
        """Reads texts or token IDs, truncated as the body says. Raises InvalidRequest."""
        texts, model, keep = self.state.texts, self.model, self.body.truncate_prompt_tokens
        special = self.body.add_special_tokens is not False
        prompts: list[Prompt] = []
        total = PromptTotal(param)
        async for entry in in_turns(listed_prompts(given, param)):
            prompt = await read_prompt(
                texts, model, entry, add_special_tokens=special, param=param, must_fit=keep is None
            )
            prompt = truncate(texts, model, prompt, keep, 1)
            fit_max_tokens(texts, model, len(prompt.token_ids), 1, None, param)
            prompts.append(total.add(prompt))
        return prompts

    async def start(self, prompts: Sequence[Prompt], pooling: Pooling | HeadTask) -> list[Sample]:
        """Makes a sequence for each prompt. Raises QuotaExceeded, or InvalidRequest for too much work."""
        tasks = [
            Task(
                prompt,
                self.model,
                _NO_ANSWER,
                cache_salt=self.body.cache_salt,
                priority=self.priority,
                pooling=pooling,
            )
            for prompt in prompts
        ]
        return await make_samples(self.state, self.request, self.id, tasks, self.deadline)

    def head(self, task: HeadTask) -> AdapterClassifier:
        """Returns the adapter's head. Raises InvalidRequest if it has none for the task."""
        head = self.model.language.classifier
        if head is not None and head.task == task:
            return head
        if head is not None:
            where = "/pooling" if head.task == "token_classify" else "/classify"
            raise InvalidRequest(
                f"the head of {self.model.name!r} is for the task {head.task!r}; use {where} with it.", "model"
            )
        reason = self.model.fallback_reason
        raise InvalidRequest(
            f"{self.model.name!r} has no classification head. Name an adapter that was trained with PEFT's task type "
            f"{'SEQ_CLS' if task == 'classify' else 'TOKEN_CLS'}."
            + ("" if reason is None else f" The adapter cannot be served: {reason}"),
            "model",
        )

    async def answer(self, samples: Sequence[Sample], write: Callable[[list[Delta]], dict[str, object]]) -> Response:
        """Waits for the samples, and returns what `write` makes of them, with the model and the usage added. It may
        repeat texts of the body."""
        deltas = await collect(samples)
        num_values = sum(len(delta.embedding) // 4 for delta in deltas) + body_bytes_of(self.request.scope) // 16
        return await run_by_count(
            self.state.long_work, self.model, num_values, lambda: self._write(samples, write(deltas))
        )

    def _write(self, samples: Sequence[Sample], content: dict[str, object]) -> Response:
        fallback = fallback_of(samples)
        content["model"] = self.model.name if fallback is None else self.state.config.base_id
        if fallback is not None:
            content["lora_fallback"] = fallback
        content.setdefault("usage", usage_of(samples))
        return json_response(content, answer_headers(samples))

    def listed(self, entries: list[dict[str, object]]) -> dict[str, object]:
        """Returns the fields of vLLM's lists."""
        return {"id": self.id, "object": "list", "created": int(time.time()), "data": entries}


def check_head_values(prompts: Sequence[Prompt], head: AdapterClassifier, param: str) -> None:
    """Raises InvalidRequest if the head would compute too many numbers for one request."""
    rows = len(prompts) if head.task == "classify" else sum(len(prompt.token_ids) for prompt in prompts)
    if rows * len(head.labels) > MAX_HEAD_VALUES:
        what = "prompts" if head.task == "classify" else "tokens"
        raise InvalidRequest(
            f"`{param}` has {rows} {what}, for each of which the head computes {len(head.labels)} numbers; at most "
            f"{MAX_HEAD_VALUES} are allowed in one request. Send fewer {what}.",
            param,
        )


def vector_of(delta: Delta) -> Values:
    return np.frombuffer(delta.embedding, np.float32)


def activated(head: AdapterClassifier, delta: Delta, use_activation: bool | None) -> Values:
    """Returns a head's outputs [rows, labels] as probabilities, or as they are if `use_activation` is false."""
    logits_TL = vector_of(delta).reshape(-1, len(head.labels))
    if use_activation is False or head.activation == "none":
        return logits_TL
    if head.activation == "sigmoid":
        # Both forms are exact; each is used where its exponential cannot overflow.
        small_TL = np.exp(-np.abs(logits_TL))
        return np.where(logits_TL >= 0, 1 / (1 + small_TL), small_TL / (1 + small_TL))
    powers_TL: Values = np.exp(logits_TL - logits_TL.max(axis=1, keepdims=True))
    powers_TL /= powers_TL.sum(axis=1, keepdims=True)
    return powers_TL

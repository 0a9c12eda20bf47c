"""Serves OpenAI's /v1/completions, whole or as a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.answer import completion_types as answers
from lorafleet.api.answer.envelope import Envelope, draw_key, request_id
from lorafleet.api.answer.generation import Sample, Task, collect, make_samples, usage_of
from lorafleet.api.answer.logprobs import completion_logprobs, prompt_offsets, vllm_prompt_logprobs
from lorafleet.api.answer.responses import WholeReply, event, json_response
from lorafleet.api.answer.streaming import StreamUsage, TextChunk, answer_headers, event_stream
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.priority import checked_priority
from lorafleet.api.request.prompts import Prompt, PromptTotal, fit_max_tokens, listed_prompts, read_prompt, truncate
from lorafleet.api.request.request_bodies import CompletionRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.request.sampling import fitted, read_params
from lorafleet.api.request.weight_demand import read_demand
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.api.text_service import TextService
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.protocol.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's default.


@describe(
    "Text completion", body=CompletionRequest, answer=answers.Completion, events=answers.Completion, headers=STARTING
)
async def completions(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, CompletionRequest)
    async with deadline.while_finding_models(trace_of(request)):
        model = await state.models.find(
            caller_of(request), body.model, draw_key(request, body.request_id, body.seed), body.lora_weights
        )
    label_request(request.scope, state.telemetry.metrics.label(model.lora))
    demand = read_demand(model, body)
    scoring = bool(body.echo) and body.max_tokens == 0  # OpenAI's way to ask for the prompt's logprobs only.
    asked = 1 if scoring else body.max_tokens
    params = await _read_params(state, request, model, body, asked)
    prompts = await _read_prompts(state.texts, model, body)
    fits = [fit_max_tokens(state.texts, model, len(p.token_ids), asked, DEFAULT_MAX_TOKENS, "prompt") for p in prompts]
    priority = checked_priority(state.access.gate, model.caller, body.priority)
    envelope = Envelope(request_id(request, "cmpl-", body.request_id), "text_completion", state.config.base_id)
    tasks = [
        Task(
            prompt,
            model,
            fitted(params, fit),
            scoring,
            body.cache_salt,
            priority,
            demand,
            bool(body.return_weight_versions),
            bool(body.return_routed_experts),
        )
        for prompt, fit in zip(prompts, fits, strict=True)
    ]
    answer = _Answer(state.long_work, body, await make_samples(state, request, envelope.id, tasks, deadline), envelope)
    return answer.stream() if body.stream else WholeReply(answer.whole)


async def _read_params(
    state: AppState, request: Request, model: ServedModel, body: CompletionRequest, max_tokens: int | None
) -> SamplingParams:
    params = await read_params(state, request, model, body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        return msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return params


async def _read_prompts(texts: TextService, model: ServedModel, body: CompletionRequest) -> list[Prompt]:
    special, keep, total = body.add_special_tokens is not False, body.truncate_prompt_tokens, PromptTotal("prompt")
    prompts: list[Prompt] = []
    async for given in in_turns(listed_prompts(body.prompt, "prompt")):
        prompt = await read_prompt(
            texts, model, given, add_special_tokens=special, param="prompt", must_fit=keep is None
        )
        prompts.append(total.add(truncate(texts, model, prompt, keep, body.max_tokens)))
    return prompts


@dataclass(slots=True)
class _Answer:
    """The answer to one request, whole or streamed."""

    threads: FairThreads
    body: CompletionRequest
    samples: list[Sample]
    envelope: Envelope

    async def whole(self) -> Response:
        answers = await collect(self.samples)
        choices = [_Choice(self, sample) for sample in self.samples]
        num_values = sum(choice.count_values(delta, first=True) for choice, delta in zip(choices, answers, strict=True))
        write = partial(self._write_whole, choices, answers)
        return await run_by_count(self.threads, self.samples[0].model, num_values, write)

    def _write_whole(self, opened: list[_Choice], answers: list[Delta]) -> Response:
        choices = [choice.choice(delta, first=True) for choice, delta in zip(opened, answers, strict=True)]
        content = {**self.envelope.whole(self.samples), "choices": choices, "usage": usage_of(self.samples)}
        return json_response(content, answer_headers(self.samples))

    def stream(self) -> Response:
        usage = StreamUsage(self.body, self.samples)
        return event_stream(
            self.threads, self.samples, self.envelope, usage, lambda sample: _ChoiceStream(self, sample, usage)
        )


@dataclass
class _Choice:
    answer: _Answer
    sample: Sample

    @cached_property
    def echoed(self) -> str:
        echo = self.answer.body.echo
        return self.sample.prompt.written(self.sample.model.tokenizer) if echo else ""

    def count_values(self, delta: Delta, *, first: bool) -> int:
        num_values, body = self.sample.count_values(delta), self.answer.body
        if first and (body.echo or body.return_token_ids):
            num_values += len(self.sample.prompt.token_ids)
        return num_values

    def choice(self, delta: Delta, *, first: bool) -> dict[str, object]:
        """Returns the JSON of one choice or of one of its chunks. The first chunk has the fields about the prompt."""
        body = self.answer.body
        choice: dict[str, object] = {
            "index": self.sample.index,
            "text": (self.echoed if first else "") + delta.text,
            "logprobs": self._logprobs(delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = vllm_prompt_logprobs(self.sample.model.tokenizer, delta.prompt_logprobs or [])
        if delta.finish_reason is not None:
            choice |= self.sample.weight_versions() | self.sample.routed_experts()
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.sample.prompt.token_ids
        return choice

    def _logprobs(self, delta: Delta, first: bool) -> dict[str, object] | None:
        body, tokenizer = self.answer.body, self.sample.model.tokenizer
        if body.logprobs is None:
            return None
        entries: Iterable[TokenLogprobs | None] = delta.logprobs or ()
        offsets: Sequence[int] = [len(self.echoed) + offset for offset in delta.offsets]
        prompt_ids = self.sample.prompt.token_ids
        if body.echo and first:
            entries = itertools.chain(delta.prompt_logprobs or (None,), entries)
            offsets = [*prompt_offsets(tokenizer, prompt_ids, len(self.echoed)), *offsets]
        as_ids = bool(body.return_tokens_as_token_ids)
        return completion_logprobs(tokenizer, entries, offsets, first=prompt_ids[0], as_ids=as_ids)


class _ChoiceStream:
    """Writes the chunks of one choice.

    The first and the last chunk are complete. Those between have only text, unless the request asks for more.
    """

    def __init__(self, answer: _Answer, sample: Sample, usage: StreamUsage) -> None:
        body = answer.body
        self._choice = _Choice(answer, sample)
        self._usage = usage
        self._first = True
        self._text_only = body.logprobs is None and not body.return_token_ids and not usage.continuous
        self._envelope = answer.envelope.chunk(sample)
        plain = self._choice.choice(Delta(text=TextChunk.mark), first=False)
        self._text = TextChunk({**self._envelope, "choices": [plain], **usage.field()})

    def count_values(self, delta: Delta) -> int:
        return self._choice.count_values(delta, first=self._first)

    def write(self, delta: Delta) -> bytes:
        if self._first or delta.finish_reason is not None:
            return self._write_full(delta)
        if self._text_only:
            return self._text.with_text(delta.text) if delta.text else b""
        return self._write_full(delta) if delta.text or delta.token_ids else b""

    def _write_full(self, delta: Delta) -> bytes:
        first, self._first = self._first, False
        sample = self._choice.sample
        choice = self._choice.choice(delta, first=first)
        fallback = self._choice.answer.envelope.fallback([sample]) if first else {}
        usage = self._usage.field(sample if self._usage.continuous else None)
        return event({**self._envelope, "choices": [choice], **fallback, **usage})

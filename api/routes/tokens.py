"""Serves vLLM's routes for trainers that keep the tokens themselves.

/inference/v1/generate takes and returns token IDs, and /v1/chat/completions/render makes its body from a chat request.

/inference/v1/generate samples exactly as its body says: a model's own sampling defaults and an adapter's format are
not added. The renderer adds the model's defaults to the body that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.answer import token_types as answers
from lorafleet.api.answer.envelope import draw_key, request_id
from lorafleet.api.answer.generation import Sample, Task, collect, fallback_of, make_samples, usage_of
from lorafleet.api.answer.logprobs import chat_logprobs, vllm_prompt_logprobs
from lorafleet.api.answer.responses import DONE, EventStream, WholeReply, event, json_response
from lorafleet.api.answer.streaming import answer_headers, choice_events
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.priority import checked_priority
from lorafleet.api.request.prompts import Prompt, fit_max_tokens, read_prompt
from lorafleet.api.request.request_bodies import ChatRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.request.sampling import fitted, read_logit_bias, with_banned_tokens
from lorafleet.api.request.token_bodies import TokenSampling, TokensRequest
from lorafleet.api.request.weight_demand import read_demand
from lorafleet.api.routes.chat import (
    count_logprobs_asked,
    read_chat_params,
    read_chat_prompt,
    read_chat_tools,
    with_answer_format,
)
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.routes.tokenize import charge_auxiliary
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # vLLM's default for SamplingParams.
_SAME_NAMES = set(SamplingParams.__struct_fields__) & set(TokenSampling.model_fields) - {"logit_bias"}


@describe(
    "Completion of token IDs, as in vLLM",
    body=TokensRequest,
    answer=answers.GeneratedTokens,
    events=answers.GeneratedTokens,
    headers=STARTING,
)
async def generate_tokens(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, TokensRequest)
    sampling = body.sampling_params
    async with deadline.while_finding_models(trace_of(request)):
        key = draw_key(request, body.request_id, sampling.seed)
        model = await state.models.find(caller_of(request), body.model, key, body.lora_weights)
    label_request(request.scope, state.telemetry.metrics.label(model.lora))
    if body.stream and sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "`sampling_params.prompt_logprobs` cannot be streamed; set stream to false.",
            "sampling_params.prompt_logprobs",
        )
    if not isinstance(body.token_ids, list):
        raise InvalidRequest("`token_ids` must be a list of token ids.", "token_ids")
    prompt = await read_prompt(state.texts, model, body.token_ids, add_special_tokens=False, param="token_ids")
    params = await _params_of(state, model, sampling)
    asked = sampling.max_tokens
    fit = fit_max_tokens(state.texts, model, len(prompt.token_ids), asked, DEFAULT_MAX_TOKENS, "token_ids")
    task = Task(
        prompt,
        model,
        fitted(params, fit),
        cache_salt=body.cache_salt,
        priority=checked_priority(state.access.gate, model.caller, body.priority),
        version_demand=read_demand(model, body),
        names_weights=bool(body.return_weight_versions),
        returns_experts=bool(body.return_routed_experts),
    )
    answer_id = request_id(request, "", body.request_id)
    samples = await make_samples(state, request, answer_id, [task], deadline)
    answer = _Answer(state.long_work, state.config.base_id, sampling, answer_id, samples)
    return answer.stream() if body.stream else WholeReply(answer.whole)


async def _params_of(state: AppState, model: ServedModel, sampling: TokenSampling) -> SamplingParams:
    given = {name: value for name in _SAME_NAMES if (value := getattr(sampling, name)) is not None}
    params = SamplingParams(**given, logit_bias=read_logit_bias(sampling.logit_bias))
    params = await with_banned_tokens(state.texts, model, params)
    params.check_vocabulary(state.texts.vocab_size(model))
    return params


@dataclass(slots=True)
class _Answer:
    """The answer to one request, whole or streamed."""

    threads: FairThreads
    base_id: str
    sampling: TokenSampling
    id: str
    samples: list[Sample]

    async def whole(self) -> Response:
        found = await collect(self.samples)
        num_values = sum(sample.count_values(delta) for sample, delta in zip(self.samples, found, strict=True))
        return await run_by_count(self.threads, self.samples[0].model, num_values, lambda: self._write_whole(found))

    def _write_whole(self, found: list[Delta]) -> Response:
        choices = [self._choice(sample, delta) for sample, delta in zip(self.samples, found, strict=True)]
        content = {**self._around(), "choices": choices, "usage": usage_of(self.samples)}
        if self.sampling.prompt_logprobs is not None:
            tokenizer = self.samples[0].model.tokenizer
            content["prompt_logprobs"] = vllm_prompt_logprobs(tokenizer, found[0].prompt_logprobs or [])
        return json_response(content, answer_headers(self.samples))

    def stream(self) -> Response:
        headers: dict[str, str] = {}
        events = choice_events(
            self.threads, self.samples, lambda sample: _ChoiceStream(self, sample), lambda: DONE, headers
        )
        return EventStream(events, headers)

    def chunk(self, sample: Sample, delta: Delta) -> bytes:
        return event({**self._around(), "choices": [self._choice(sample, delta)]})

    def _around(self) -> dict[str, object]:
        """Returns the fields beside the choices."""
        fallback = fallback_of(self.samples)
        if fallback is not None:
            return {"request_id": self.id, "model": self.base_id, "lora_fallback": fallback}
        return {"request_id": self.id, "model": self.samples[0].model.name}

    def _choice(self, sample: Sample, delta: Delta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": sample.index,
            "token_ids": delta.token_ids,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.sampling.logprobs is not None:
            choice["logprobs"] = chat_logprobs(sample.model.tokenizer, delta.logprobs or [], as_ids=True)
        if delta.finish_reason is not None:
            choice |= sample.weight_versions() | sample.routed_experts()
        return choice


@dataclass(frozen=True, slots=True)
class _ChoiceStream:
    """Writes the chunks of one choice."""

    answer: _Answer
    sample: Sample

    def count_values(self, delta: Delta) -> int:
        return self.sample.count_values(delta)

    def write(self, delta: Delta) -> bytes:
        return self.answer.chunk(self.sample, delta) if delta.token_ids or delta.finish_reason else b""


@describe("Render a chat request as a body of /inference/v1/generate", body=ChatRequest, answer=answers.RenderedChat)
async def render_chat_tokens(state: AppState, request: Request) -> Response:
    body = await read_body(state, request, ChatRequest)
    key = draw_key(request, body.request_id, body.seed)
    model = await state.models.find(caller_of(request), body.model, key, body.lora_weights)
    params = await read_chat_params(state, request, model, body)
    tools = await read_chat_tools(state, request, model, body, params.structured_outputs)
    prompt: Prompt = await read_chat_prompt(state, request, model, body, tools)
    answered = await with_answer_format(state, request, model, params, prompt, tools)
    if answered.structured_outputs is not None:
        raise InvalidRequest(
            "A request whose answer must have a format cannot be rendered, since /inference/v1/generate takes no "
            "format. Leave the format and any budget for reasoning out, and let `tool_choice` be 'auto' or 'none'.",
            "response_format",
        )
    charge_auxiliary(state, request, len(prompt.token_ids))
    fit = fit_max_tokens(state.texts, model, len(prompt.token_ids), params.max_tokens, None, "messages")
    same = {name: value for name in _SAME_NAMES if (value := getattr(body, name, None)) is not None}
    sampling = {**state.config.generation_defaults, **same, "max_tokens": fit}
    sampling.pop("logprobs", None)
    if (logprobs := count_logprobs_asked(body)) is not None:
        sampling["logprobs"] = logprobs
    if body.logit_bias:
        sampling["logit_bias"] = body.logit_bias
    more = (
        *("lora_weights", "cache_salt", "priority"),
        *("return_weight_versions", "weight_version", "min_weight_version", "return_routed_experts"),
    )
    content: dict[str, object] = {
        "request_id": request_id(request, "chatcmpl-", body.request_id),
        "model": model.name,
        "token_ids": prompt.token_ids,
        "sampling_params": sampling,
        "stream": bool(body.stream),
        **{name: value for name in more if (value := getattr(body, name)) is not None},
    }
    return await run_by_count(state.long_work, model, len(prompt.token_ids), lambda: json_response(content))

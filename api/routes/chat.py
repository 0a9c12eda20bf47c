"""Serves OpenAI's /v1/chat/completions, and starts the samples of /v1/responses and /v1/messages."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import run_by_count, run_by_size
from lorafleet.api.answer import completion_types as answers
from lorafleet.api.answer.envelope import Envelope, draw_key, request_id
from lorafleet.api.answer.error_responses import in_own_words
from lorafleet.api.answer.generation import Sample, Task, collect, make_samples, usage_of
from lorafleet.api.answer.logprobs import chat_logprobs, vllm_prompt_logprobs
from lorafleet.api.answer.responses import WholeReply, event, json_response
from lorafleet.api.answer.streaming import StreamUsage, TextChunk, answer_headers, event_stream
from lorafleet.api.app_state import AppState
from lorafleet.api.request.function_tools import (
    AnswerReader,
    ParsedAnswer,
    ToolUse,
    delta_of,
    read_answer,
    read_tools,
    reasoning_fields,
    written_call,
)
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.priority import checked_priority
from lorafleet.api.request.prompts import Prompt, encode, fit_max_tokens, render_chat, truncate
from lorafleet.api.request.request_bodies import ChatRequest
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.request.sampling import fitted, read_params
from lorafleet.api.request.weight_demand import read_demand
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.structured_spec import StructuredOutputs


@describe("Chat", body=ChatRequest, answer=answers.ChatCompletion, events=answers.ChatCompletionChunk, headers=STARTING)
async def chat(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, ChatRequest)
    started = await start_chat(state, request, body, deadline, "chatcmpl-")
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(started.id, kind, state.config.base_id)
    answer = _Answer(state.long_work, body, started.samples, envelope, started.tools)
    return answer.stream() if body.stream else WholeReply(answer.whole)


@dataclass(frozen=True, slots=True)
class StartedChat:
    id: str
    samples: list[Sample]
    tools: ToolUse


async def start_chat(
    state: AppState,
    request: Request,
    body: ChatRequest,
    deadline: RequestDeadline,
    prefix: str,
    structured_outputs: StructuredOutputs | None = None,
    *,
    limits_answer_to_room: bool = False,
) -> StartedChat:
    """Reads and starts a chat request, also for /v1/responses and /v1/messages.

    Args:
        prefix: The beginning of the answer's ID.
        limits_answer_to_room: Lowers max_tokens to the room in the context, instead of rejecting the request.
    """
    async with deadline.while_finding_models(trace_of(request)):
        model = await state.models.find(
            caller_of(request), body.model, draw_key(request, body.request_id, body.seed), body.lora_weights
        )
    label_request(request.scope, state.telemetry.metrics.label(model.lora))
    demand = read_demand(model, body)
    params = await read_chat_params(state, request, model, body)
    tools = await read_chat_tools(state, request, model, body, structured_outputs or params.structured_outputs)
    prompt = await read_chat_prompt(state, request, model, body, tools)
    params = await with_answer_format(state, request, model, params, prompt, tools)
    asked = _asked(body)
    exact, at_most = (None, asked) if limits_answer_to_room else (asked, None)
    fit = fit_max_tokens(state.texts, model, len(prompt.token_ids), exact, at_most, "messages")
    priority = checked_priority(state.access.gate, model.caller, body.priority)
    answer_id = request_id(request, prefix, body.request_id)
    task = Task(
        prompt,
        model,
        fitted(params, fit),
        cache_salt=body.cache_salt,
        priority=priority,
        version_demand=demand,
        names_weights=bool(body.return_weight_versions),
        returns_experts=bool(body.return_routed_experts),
    )
    samples = await make_samples(state, request, answer_id, [task], deadline)
    return StartedChat(answer_id, samples, tools)


async def count_prompt_tokens(state: AppState, request: Request, body: ChatRequest) -> int:
    model = await state.models.find(caller_of(request), body.model)
    tools = await read_chat_tools(state, request, model, body, None)
    text = await render_chat(state, request, model, body, tools.shown)
    return len(await encode(state.texts, model, text, add_special_tokens=False))


async def read_chat_tools(
    state: AppState, request: Request, model: ServedModel, body: ChatRequest, text: StructuredOutputs | None
) -> ToolUse:
    """Reads the tools of a request. `text` is the format of answers that are not calls. Raises InvalidRequest."""
    return await run_by_size(state.long_work, request, lambda: read_tools(state.texts, model, body, text))


async def with_answer_format(
    state: AppState, request: Request, model: ServedModel, params: SamplingParams, prompt: Prompt, tools: ToolUse
) -> SamplingParams:
    """Returns the parameters with the format of the whole answer: its reasoning, its calls and its text."""
    end = prompt.ending(model.tokenizer)
    return await run_by_size(state.long_work, request, lambda: tools.params(params, end, model.tokenizer))


async def read_chat_prompt(
    state: AppState, request: Request, model: ServedModel, body: ChatRequest, tools: ToolUse
) -> Prompt:
    """Renders and tokenizes the messages, and truncates the prompt as the request says."""
    text = await render_chat(state, request, model, body, tools.shown)
    named = "messages" if body.truncate_prompt_tokens is None else None
    token_ids = await encode(state.texts, model, text, add_special_tokens=bool(body.add_special_tokens), must_fit=named)
    if not token_ids:
        raise InvalidRequest("The chat template renders these messages as an empty prompt.", "messages")
    return truncate(state.texts, model, Prompt(token_ids, text), body.truncate_prompt_tokens, _asked(body))


async def read_chat_params(state: AppState, request: Request, model: ServedModel, body: ChatRequest) -> SamplingParams:
    """Returns the sampling parameters of a chat request. Errors name the request's own fields."""
    asked, logprobs = _asked(body), count_logprobs_asked(body)
    try:
        return await read_params(state, request, model, body, max_tokens=asked, logprobs=logprobs)
    except InvalidRequest as error:
        raise in_own_words(error, _own_names(body)) from None


def _asked(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _own_names(body: ChatRequest) -> dict[str, str]:
    """Returns the request's names of the fields that the engine's parameters name differently."""
    names = {"logprobs": "top_logprobs"}
    return names if body.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def count_logprobs_asked(body: ChatRequest) -> int | None:
    """Returns the number of the best tokens whose logprobs are wanted, or None if no logprobs are."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("`top_logprobs` requires `logprobs` to be true.", "top_logprobs")
    return None


@dataclass(slots=True)
class _Answer:
    """The answer to one request, whole or streamed."""

    threads: FairThreads
    body: ChatRequest
    samples: list[Sample]
    envelope: Envelope
    tools: ToolUse

    async def whole(self) -> Response:
        answers = await collect(self.samples)
        num_values = sum(sample.count_values(delta) for sample, delta in zip(self.samples, answers, strict=True))
        return await run_by_count(self.threads, self.samples[0].model, num_values, lambda: self._write_whole(answers))

    def _write_whole(self, answers: list[Delta]) -> Response:
        content: dict[str, object] = {
            **self.envelope.whole(self.samples),
            "choices": [self._choice(sample, delta) for sample, delta in zip(self.samples, answers, strict=True)],
            "usage": usage_of(self.samples),
        }
        if self.body.prompt_logprobs is not None:
            entries = answers[0].prompt_logprobs or []
            content["prompt_logprobs"] = vllm_prompt_logprobs(self.samples[0].model.tokenizer, entries)
        if self.body.return_token_ids:
            content["prompt_token_ids"] = self.samples[0].prompt.token_ids
        return json_response(content, answer_headers(self.samples))

    def stream(self) -> Response:
        usage = StreamUsage(self.body, self.samples)
        return event_stream(
            self.threads, self.samples, self.envelope, usage, lambda sample: _ChoiceStream(self, sample, usage)
        )

    def _choice(self, sample: Sample, delta: Delta) -> dict[str, object]:
        read = ParsedAnswer(delta.text, [])
        if self.tools.parses:
            read = read_answer(self.tools.reader(_prompt_end(sample), eager=False), delta.text)
        message: dict[str, object] = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning:
            message |= reasoning_fields(read.reasoning)
        if read.calls:
            message["tool_calls"] = [written_call(call) for call in read.calls]
        return {"index": sample.index, "message": message, **self.extras(sample, delta, has_called=bool(read.calls))}

    def extras(self, sample: Sample, delta: Delta, *, has_called: bool) -> dict[str, object]:
        """Returns the fields that a choice has in addition to its text, whole or in a chunk."""
        fields: dict[str, object] = {
            "logprobs": self._logprobs(delta),
            "finish_reason": "tool_calls" if has_called and delta.finish_reason == "stop" else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            fields["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            fields |= sample.weight_versions() | sample.routed_experts()
        return fields

    def _logprobs(self, delta: Delta) -> dict[str, object] | None:
        if not self.body.logprobs or (delta.logprobs is None and self.body.stream):
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(self.samples[0].model.tokenizer, delta.logprobs or [], as_ids=as_ids)


def _prompt_end(sample: Sample) -> str:
    return sample.prompt.ending(sample.model.tokenizer)


class _ChoiceStream:
    """Writes the chunks of one choice: first its role, then its text, its reasoning and its calls as they come."""

    def __init__(self, answer: _Answer, sample: Sample, usage: StreamUsage) -> None:
        body = answer.body
        self._answer = answer
        self._sample = sample
        self._usage = usage
        self._opened = False
        self._reader = answer.tools.reader(_prompt_end(sample), eager=True) if answer.tools.parses else None
        self._text_only = not body.logprobs and not body.return_token_ids and not usage.continuous
        self._envelope = answer.envelope.chunk(sample)
        self._text = TextChunk(self._chunk({"content": TextChunk.mark}, Delta()))

    def count_values(self, delta: Delta) -> int:
        return self._sample.count_values(delta)

    def write(self, delta: Delta) -> bytes:
        opening = b"" if self._opened else self._open()
        if self._reader is not None:
            return opening + self._write_read(self._reader, delta)
        if delta.finish_reason is None and self._text_only:
            return opening + (self._text.with_text(delta.text) if delta.text else b"")
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return opening
        return opening + event(self._chunk({"content": delta.text} if delta.text else {}, delta))

    def _write_read(self, reader: AnswerReader, delta: Delta) -> bytes:
        """Writes a chunk for each piece of text or of a call. The last chunk has the rest of the delta."""
        pieces = [delta_of(event) for event in reader.push(delta.text)]
        if delta.finish_reason is not None:
            pieces += [*map(delta_of, reader.finish()), {}]
        elif delta.token_ids and not self._text_only and not pieces:
            pieces = [{}]
        chunks = [self._chunk(piece, Delta()) for piece in pieces[:-1]]
        return b"".join(map(event, [*chunks, *(self._chunk(piece, delta) for piece in pieces[-1:])]))

    def _open(self) -> bytes:
        self._opened = True
        chunk = self._chunk({"role": "assistant", "content": ""}, Delta())
        chunk |= self._answer.envelope.fallback([self._sample])
        if self._answer.body.return_token_ids:
            chunk["prompt_token_ids"] = self._sample.prompt.token_ids
        return event(chunk)

    def _chunk(self, content: dict[str, object], delta: Delta) -> dict[str, object]:
        has_called = self._reader is not None and self._reader.has_called
        choice = {
            "index": self._sample.index,
            "delta": content,
            **self._answer.extras(self._sample, delta, has_called=has_called),
        }
        usage = self._usage.field(self._sample if self._usage.continuous else None)
        return {**self._envelope, "choices": [choice], **usage}

"""Serves SGLang's /generate, for one or more prompts of text or token IDs.

As in SGLang, each chunk of a stream repeats the whole text so far. The first and the last chunk have the logprobs of
the prompt. Sampling defaults are SGLang's, not the model's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import run_by_count, run_by_size
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.answer import token_types as answers
from lorafleet.api.answer.encoded_list import EncodedList
from lorafleet.api.answer.envelope import check_request_id, draw_key, request_id
from lorafleet.api.answer.generation import LOGPROB_BYTES, Sample, Task, collect, fallback_of, make_samples, merged
from lorafleet.api.answer.logprobs import LOWEST
from lorafleet.api.answer.responses import DONE, EventStream, WholeReply, event, json_response
from lorafleet.api.answer.streaming import answer_headers
from lorafleet.api.app_state import AppState
from lorafleet.api.request.chat_messages import string
from lorafleet.api.request.parsing import parse_object, read_body
from lorafleet.api.request.prompts import Prompt, PromptTotal, fit_max_tokens, listed_prompts, read_prompt
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.request.sampling import fitted, read_logit_bias
from lorafleet.api.request.structured import read_sglang_structured
from lorafleet.api.request.token_bodies import SGLangRequest, SGLangSampling
from lorafleet.api.request.weight_demand import read_demand
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import label_request
from lorafleet.api.telemetry.traced import trace_of
from lorafleet.api.text.output import Delta
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_MODEL_CHARS, MAX_NAMED_MODELS
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.unread_outputs import TOKEN_BYTES

DEFAULT_MAX_NEW_TOKENS = 128
# SGLang's names of sampling parameters, and ours. logit_bias is converted.
_SHARED = (set(SamplingParams.__struct_fields__) & set(SGLangSampling.model_fields)) - {"logit_bias"}
_OUR_NAMES = {name: name for name in _SHARED} | {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}


@describe(
    "SGLang's completion",
    body=SGLangRequest,
    answer=answers.Generated | list[answers.Generated],
    events=answers.Generated,
    headers=STARTING,
)
async def generate(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, SGLangRequest)
    param, given, is_batch = _listed_prompts(body)
    sampling = await run_by_size(state.long_work, request, lambda: _read_sampling(body, len(given)))
    async with deadline.while_finding_models(trace_of(request)):
        models = await _read_models(state, request, body, sampling)
    prompts, total = list[Prompt](), PromptTotal(param)
    async for model, prompt in in_turns(zip(models, given, strict=True)):
        prompts.append(total.add(await read_prompt(state.texts, model, prompt, add_special_tokens=True, param=param)))
    label_request(request.scope, state.telemetry.metrics.label(models[0].lora))
    tasks = await run_by_size(state.long_work, request, lambda: _make_tasks(state, body, prompts, models, sampling))
    rids = _read_rids(request, body, len(prompts))
    samples = await make_samples(state, request, rids[0], tasks, deadline)
    ids = [rid for rid, task in zip(rids, tasks, strict=True) for _ in range(task.params.n)]
    results = [_Result(body, sample, rid) for sample, rid in zip(samples, ids, strict=True)]
    if body.stream:
        headers: dict[str, str] = {}
        return EventStream(_stream(state.long_work, results, len(samples) > 1, headers), headers)
    return WholeReply(lambda: _whole(state.long_work, results, is_batch or len(samples) > 1))


async def _whole(threads: FairThreads, results: Sequence[_Result], as_list: bool) -> Response:
    samples = [result.sample for result in results]
    answers = await collect(samples)

    def write() -> Response:
        for result, answer in zip(results, answers, strict=True):
            result.add(answer)
        content = [result.render() for result in results]
        return json_response(content if as_list else content[0], answer_headers(samples))

    num_values = sum(sample.count_values(delta) for sample, delta in zip(samples, answers, strict=True))
    return await run_by_count(threads, samples[0].model, num_values, write)


async def _stream(
    threads: FairThreads, results: Sequence[_Result], indexed: bool, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    samples = [result.sample for result in results]
    running = len(samples)
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            headers.update(answer_headers(samples))
            num_bytes = TOKEN_BYTES * len(delta.token_ids) + len(delta.text)
            sample.keep(num_bytes + LOGPROB_BYTES * sample.count_values(delta))  # Each chunk repeats them.
            write = partial(_write_chunk, results[sample.index], delta, indexed)
            chunk = await run_by_count(threads, sample.model, sample.count_values(delta), write)
            running -= delta.finish_reason is not None
            yield chunk + (b"" if running else DONE)


def _write_chunk(result: _Result, delta: Delta, indexed: bool) -> bytes:
    result.add(delta)
    return event(result.render() | ({"index": result.sample.index} if indexed else {}))


def _listed_prompts(body: SGLangRequest) -> tuple[str, list[object], bool]:
    """Returns the field of the prompts, each prompt as it was given, and whether they were given in a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("Give either `text` or `input_ids`.", "text")
    param, given = ("input_ids", body.input_ids) if body.text is None else ("text", body.text)
    first = given[0] if isinstance(given, list) and given else given
    if isinstance(first, str) != (param == "text"):
        raise InvalidRequest(
            f"`{param}` may hold only {'strings or lists' if param == 'text' else 'token ids'}.", param
        )
    is_batch = isinstance(given, list) and not isinstance(first, int)
    return param, listed_prompts(given, param), is_batch


def _read_sampling(body: SGLangRequest, num_prompts: int) -> list[SGLangSampling]:
    """Returns the parameters of each prompt. Prompts that share an object of the body share what is read from it."""
    if not isinstance(body.sampling_params, list):
        return [_read_one_sampling(body.sampling_params)] * num_prompts
    given = _per_prompt(body.sampling_params, num_prompts, _SAMPLING)
    return [_read_one_sampling(entry) for entry in given]


def _read_one_sampling(given: object) -> SGLangSampling:
    if given is None:
        return SGLangSampling()
    if not isinstance(given, dict):
        raise InvalidRequest("`sampling_params` must be an object, or a list with one for each prompt.", _SAMPLING)
    return parse_object(given, SGLangSampling, f"{_SAMPLING}.")


_SAMPLING = "sampling_params"


async def _read_models(
    state: AppState, request: Request, body: SGLangRequest, sampling: Sequence[SGLangSampling]
) -> list[ServedModel]:
    """Returns the model of each prompt: `lora_path` in either place, else `model`, else the base model."""
    outer = _per_prompt(body.lora_path, len(sampling), "lora_path")
    param = "sampling_params.lora_path"
    inner = [
        _per_prompt(params.lora_path, len(sampling), param)[i]
        if isinstance(params.lora_path, list)
        else params.lora_path
        for i, params in enumerate(sampling)
    ]
    rids = _per_prompt(body.rid, len(sampling), "rid")
    models: dict[tuple[str | None, str | None], ServedModel] = {}
    asked: list[tuple[str | None, str | None]] = []
    for out, within, rid, params in zip(outer, inner, rids, sampling, strict=True):
        name = _read_name(out, within)
        key = draw_key(request, rid if isinstance(rid, str) else None, params.sampling_seed)
        asked.append((body.model if name is None else name, key))
    names = {name for name, _ in asked}
    if len(names) > MAX_NAMED_MODELS:
        raise InvalidRequest(
            f"`lora_path` names {len(names)} models; at most {MAX_NAMED_MODELS} are allowed in one request. Send the "
            "prompts of the others in further requests.",
            "lora_path",
        )
    for name, key in asked:
        if (name, key) not in models:
            models[name, key] = await state.models.find(caller_of(request), name, key)
    return [models[name_and_key] for name_and_key in asked]


def _read_name(outer: object, inner: object) -> str | None:
    if outer is not None and inner is not None and outer != inner:
        raise InvalidRequest("`lora_path` and `sampling_params.lora_path` differ; give one of them.", "lora_path")
    name = inner if outer is None else outer
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(
            "`lora_path` must be an adapter's name, or a list with a name or null for each.", "lora_path"
        )
    return None if name is None else string(name, "lora_path", MAX_MODEL_CHARS)


def _per_prompt(given: Any, num_prompts: int, param: str) -> list[Any]:
    if not isinstance(given, list):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"`{param}` has {len(given)} entries for {num_prompts} prompts; give one for each.", param)
    return given


def _read_rids(request: Request, body: SGLangRequest, num_prompts: int) -> list[str]:
    rids = _per_prompt(body.rid, num_prompts, "rid")
    for rid in rids:
        if rid is not None and not isinstance(rid, str):
            raise InvalidRequest("`rid` must be a string, or a list with one for each prompt.", "rid")
        check_request_id(rid or "", "rid")
    return [request_id(request, "", rid) for rid in rids]


def _make_tasks(
    state: AppState,
    body: SGLangRequest,
    prompts: Sequence[Prompt],
    models: Sequence[ServedModel],
    sampling: Sequence[SGLangSampling],
) -> list[Task]:
    """Returns a task for each prompt. Prompts of one model with the same parameters share them, and their format."""
    found: dict[tuple[int, int], SamplingParams] = {}  # By the ids of the model and of the parameters in the body.
    tasks: list[Task] = []
    for prompt, model, given in zip(prompts, models, sampling, strict=True):
        params = found.get((id(model), id(given)))
        if params is None:
            params = found[id(model), id(given)] = _params_of(state, model, body, given)
        tasks.append(_make_task(state, body, prompt, model, given, params))
    return tasks


def _make_task(
    state: AppState,
    body: SGLangRequest,
    prompt: Prompt,
    model: ServedModel,
    sampling: SGLangSampling,
    params: SamplingParams,
) -> Task:
    scoring = sampling.max_new_tokens == 0
    asked = 1 if scoring else sampling.max_new_tokens
    fit = fit_max_tokens(state.texts, model, len(prompt.token_ids), asked, DEFAULT_MAX_NEW_TOKENS, "max_new_tokens")
    return Task(
        prompt,
        model,
        fitted(params, fit),
        scoring,
        version_demand=read_demand(model, body),
        names_weights=bool(body.return_weight_versions),
        returns_experts=bool(body.return_routed_experts),
    )


def _params_of(state: AppState, model: ServedModel, body: SGLangRequest, sampling: SGLangSampling) -> SamplingParams:
    """Returns the parameters, whose max_tokens is not yet fitted to a prompt."""
    given: dict[str, Any] = {
        ours: value for theirs, ours in _OUR_NAMES.items() if (value := getattr(sampling, theirs)) is not None
    }
    if body.return_logprob:
        given["logprobs"] = body.top_logprobs_num or 0
        if _first_scored(body) >= 0:
            given["prompt_logprobs"] = given["logprobs"]
    given |= {
        "logit_bias": read_logit_bias(sampling.logit_bias),
        "structured_outputs": read_sglang_structured(model, sampling),
    }
    max_tokens = 1 if sampling.max_new_tokens == 0 else sampling.max_new_tokens
    params = SamplingParams(**given, max_tokens=max_tokens)
    params.check_vocabulary(state.texts.vocab_size(model))
    return params


def _first_scored(body: SGLangRequest) -> int:
    """Returns the first prompt position whose logprobs are wanted, or -1 for none."""
    return -1 if body.logprob_start_len is None else body.logprob_start_len


class _Result:
    """The answer of one sample so far. Each token ID and logprob is encoded once, however many chunks repeat it."""

    def __init__(self, body: SGLangRequest, sample: Sample, rid: str) -> None:
        self.sample = sample
        self._rid = rid
        self._text = ""
        self._whole = Delta()  # Without its text and logprobs.
        self._token_ids = EncodedList()
        self._logprobs = _Logprobs(body, sample) if body.return_logprob else None
        self._is_first = True

    def add(self, delta: Delta) -> None:
        self._text += delta.text
        self._whole.token_ids.extend(delta.token_ids)
        self._whole.finish_reason, self._whole.stop_reason = delta.finish_reason, delta.stop_reason
        for token_id in delta.token_ids:
            self._token_ids.append(token_id)
        if self._logprobs is not None:
            self._logprobs.add(delta)

    def render(self) -> dict[str, object]:
        whole = self._whole
        meta: dict[str, object] = {
            "id": self._rid,
            "finish_reason": _finish_reason(whole),
            "prompt_tokens": len(self.sample.prompt.token_ids),
            "completion_tokens": self.sample.num_tokens,
            "cached_tokens": self.sample.num_cached_tokens,
        }
        fallback = fallback_of([self.sample])
        if fallback is not None:
            meta["lora_fallback"] = fallback
        if self._logprobs is not None:
            # The prompt may be a thousand times as long as the new part.
            meta |= self._logprobs.fields(of_prompt=self._is_first or whole.finish_reason is not None)
        if whole.finish_reason is not None:
            meta |= self.sample.weight_versions() | self.sample.routed_experts(as_sglang=True)
        self._is_first = False
        return {"text": self._text, "output_ids": self._token_ids.encoded, "meta_info": meta}


class _Logprobs:
    """Logprobs as [logprob, token ID, text or null]. As in SGLang, the first prompt token wanted has no logprob."""

    def __init__(self, body: SGLangRequest, sample: Sample) -> None:
        self._sample = sample
        self._with_texts = bool(body.return_text_in_logprobs)
        self._with_best = bool(body.top_logprobs_num)
        self._first_scored = _first_scored(body)
        self._input, self._input_best = EncodedList(), EncodedList()
        self._output, self._output_best = EncodedList(), EncodedList()

    def add(self, delta: Delta) -> None:
        if delta.prompt_logprobs and self._first_scored >= 0:
            self._add_prompt(delta.prompt_logprobs[self._first_scored :])
        for entry in delta.logprobs or []:
            self._output.append(self._entry(entry.token_id, entry.logprob))
            self._output_best.append(self._best(entry))

    def fields(self, *, of_prompt: bool) -> dict[str, object]:
        fields: dict[str, object] = {"output_token_logprobs": self._output.encoded}
        if of_prompt:
            fields["input_token_logprobs"] = self._input.encoded
        if self._with_best:
            fields["output_top_logprobs"] = self._output_best.encoded
            if of_prompt:
                fields["input_top_logprobs"] = self._input_best.encoded
        return fields

    def _add_prompt(self, scored: Sequence[TokenLogprobs | None]) -> None:
        wanted_ids = self._sample.prompt.token_ids[self._first_scored :]
        entries = [None, *scored[1:]] if scored else []
        for token_id, entry in zip(wanted_ids, entries, strict=True):
            self._input.append(self._entry(token_id, entry.logprob if entry else None))
            self._input_best.append(self._best(entry))

    def _entry(self, token_id: int, logprob: float | None) -> list[object]:
        text = self._sample.model.tokenizer.token_text(token_id) if self._with_texts else None
        return [None if logprob is None else max(logprob, LOWEST), token_id, text]

    def _best(self, entry: TokenLogprobs | None) -> list[list[object]] | None:
        if entry is None or not self._with_best:
            return None
        return [self._entry(i, p) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)]


def _finish_reason(whole: Delta) -> dict[str, object] | None:
    if whole.finish_reason is None:
        return None
    if whole.finish_reason == "length":
        return {"type": "length", "length": len(whole.token_ids)}
    if whole.finish_reason == "stop":  # For eos, its ID is reported.
        matched = whole.token_ids[-1] if whole.stop_reason is None and whole.token_ids else whole.stop_reason
        return {"type": "stop", "matched": matched}
    return {"type": whole.finish_reason}

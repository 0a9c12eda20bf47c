"""Runs the sequences of one request on the engine, and yields their outputs as they come.

There is one sequence for each prompt and sample, numbered prompt-major as OpenAI numbers choices. Closing a generator
of this module aborts its sequences.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.requests import Request

from lorafleet.api.access.body_budget import count_growth
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.answer.gathered_writes import is_stalled_of
from lorafleet.api.answer.logprobs import count_logprobs
from lorafleet.api.answer.packed_logprobs import PackedLogprobs
from lorafleet.api.answer.routed_answer import BYTES_PER_VALUE, RoutedAnswer, check_routed
from lorafleet.api.answer.weight_versions import WeightSpans, named
from lorafleet.api.app_state import AppState
from lorafleet.api.request.prompts import Prompt
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.endpoint import endpoint_of
from lorafleet.api.telemetry.sequence_observer import SequenceObserver
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.api.telemetry.traced import NO_TRACE, Trace, trace_of
from lorafleet.api.text.output import Delta, OutputProcessor
from lorafleet.protocol.errors import EngineDead, InvalidRequest, LorafleetError
from lorafleet.protocol.limits import (
    MAX_ANSWER_LOGPROBS,
    MAX_LISTED_IDS,
    MAX_PROMPT_TOKENS,
    MAX_SAMPLES,
    MAX_SENT_CHARS,
)
from lorafleet.protocol.lora_request import check_generates
from lorafleet.protocol.messages import EngineRequest, HeadTask, Pooling, TokenizerFile, VersionDemand
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.unread_outputs import TOKEN_BYTES, IsStalled, never_stalled

# Deltas of the samples of one request that wait for its stream. What comes after waits as outputs, which are bounded.
MAX_MERGED = 64
LOGPROB_BYTES = 80  # One logprob: an int, a float and their places, or its JSON.
_numbers = itertools.count()  # Clients may give two requests the same ID; the engine needs distinct IDs.


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and the kind of output to make from it."""

    prompt: Prompt
    model: ServedModel
    params: SamplingParams  # params.n is the number of samples to make.
    scoring: bool = False  # Only the prompt's logprobs are wanted; the engine makes one token, which is not shown.
    cache_salt: str | None = None  # The field of this name in the client's request.
    priority: int = 0
    version_demand: VersionDemand = "any"
    names_weights: bool = False  # Whether the answer says which weights sampled it.
    returns_experts: bool = False  # Whether the answer has the experts of its tokens.
    pooling: Pooling | HeadTask | None = None  # If set, an embedding or a head's outputs are wanted, not tokens.

    @property
    def salt(self) -> str:
        """The salt of the prefix cache in the engine. Two tenants share no block, nor do two salts of one tenant."""
        tenant = self.model.caller.tenant
        if tenant is None and self.cache_salt is None:
            return ""
        return hashlib.sha256(msgspec.json.encode((tenant, self.cache_salt))).hexdigest()


def _uncounted(_: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one request of a client."""

    name: str  # Unique.
    num_sequences: int
    num_tokens: int  # Prompt tokens of all sequences together.
    deadline: RequestDeadline
    trace: Trace = NO_TRACE
    is_stalled: IsStalled = never_stalled  # Whether the stream of the request waits for its client.
    keep: Callable[[int], None] = _uncounted  # Counts bytes of answers that are kept until the request ends.


class Sample:
    """One sequence on the engine.

    Args:
        params: The sequence's own parameters, where n is 1.
        counts_prompt: True for the first sample of a prompt, with which the usage counts the prompt.
    """

    def __init__(
        self,
        state: AppState,
        group: SampleGroup,
        index: int,
        task: Task,
        params: SamplingParams,
        tokenizer: TokenizerFile | None,
        *,
        counts_prompt: bool,
    ) -> None:
        self.index = index
        self.prompt = task.prompt
        self.model = task.model
        self.params = params
        self.counts_prompt = counts_prompt
        self.keep = group.keep
        self.weights = WeightSpans(task.model.lora)
        self._task = task
        self._engine = state.engine
        self._group = group
        self._tokenizer = tokenizer
        self._base_eos_id = state.texts.tokenizer.eos_token_id
        record = SequenceRecord(index, len(self.prompt.token_ids), counts_prompt)
        self._observer = SequenceObserver(state.telemetry, state.access, group.trace, group.name, task.model, record)
        self._processor = OutputProcessor(task.model.tokenizer, self.prompt.token_ids, params)
        self._routed: RoutedAnswer | None = None
        if task.returns_experts:
            assert state.engine.hello.routed is not None, "make_samples has checked it"
            self._routed = RoutedAnswer(state.engine.hello.routed)

    @property
    def num_tokens(self) -> int:
        return 0 if self._task.scoring else self._processor.num_tokens

    @property
    def names_weights(self) -> bool:
        return self._task.names_weights

    @property
    def weights_now(self) -> dict[str, object]:
        """The version and digest that answer now."""
        return named(None if self.fallback_reason is not None else self.weights.last)

    def weight_versions(self) -> dict[str, object]:
        """Returns the `weight_versions` entry of a whole answer, or nothing if the request does not want it."""
        if not self._task.names_weights:
            return {}
        weights = self.weights if self.fallback_reason is None else WeightSpans(None)
        return {"weight_versions": weights.spans(self.num_tokens)}

    def routed_experts(self, *, as_sglang: bool = False) -> dict[str, object]:
        """Returns the `routed_experts` entry of a whole answer, or nothing if the request does not want it."""
        if self._routed is None:
            return {}
        num_tokens = len(self.prompt.token_ids) + max(self.num_tokens - 1, 0)
        write = self._routed.as_sglang if as_sglang else self._routed.as_vllm
        return {"routed_experts": write(num_tokens)}

    def count_values(self, delta: Delta) -> int:
        """Returns the size of what must be written for the delta, in logprobs (access/long_work.py)."""
        num_bytes = 0 if self._routed is None or delta.finish_reason is None else len(self._routed.received)
        return count_logprobs(delta) + num_bytes // BYTES_PER_VALUE

    @property
    def num_cached_tokens(self) -> int:
        return self._observer.record.num_cached_tokens

    @property
    def fallback_reason(self) -> str | None:
        return self._observer.record.fallback_reason

    async def run(self) -> AsyncGenerator[tuple[Sample, Delta], None]:
        """Yields the deltas of the answer, each with this sample. The last one has a finish_reason."""
        request, observer, push, scoring = self._request(), self._observer, self._processor.push, self._task.scoring
        observer.sent()
        try:
            async with aclosing(self._engine.generate(request, self._group.is_stalled)) as outputs:
                async for output in outputs:
                    observer.received(output)
                    if self._routed is not None:
                        self._routed.received += output.routed_experts
                    if output.switches:
                        self.weights.switches += output.switches
                    delta = push(output)
                    if delta.finish_reason is not None:
                        # Before the client gets the end, so that every answer is metered.
                        observer.ended(delta.finish_reason, self.num_tokens)
                    yield self, _score_alone(delta) if scoring else delta
                    if delta.finish_reason is not None:
                        return
            raise EngineDead(f"the engine ended request {request.request_id} without an answer")
        except LorafleetError as error:
            observer.failed(error, self.num_tokens)
            raise
        finally:
            observer.ended("abort", self.num_tokens)  # This has no effect if it has ended already.

    def _request(self) -> EngineRequest:
        task, group = self._task, self._group
        return EngineRequest(
            request_id=f"{group.name}-{self.index}",
            prompt_token_ids=self.prompt.token_ids,
            params=self.params,
            lora=self.model.lora,
            vocabulary=self.model.language.vocabulary,
            base_eos_id=self._base_eos_id,
            language=self.model.language.digest,
            context_length=self.model.language.context_length,
            group=group.name,
            group_sequences=group.num_sequences,
            group_tokens=group.num_tokens,
            queue_timeout_s=group.deadline.left_s(),
            cache_salt=task.salt,
            tenant=self.model.caller.tenant or "",
            traced=group.trace.is_recording,
            priority=task.priority,
            version_demand=task.version_demand,
            pooling=task.pooling,
            returns_experts=task.returns_experts,
            tokenizer=self._tokenizer,
        )


def merged(samples: Sequence[Sample]) -> AsyncGenerator[tuple[Sample, Delta], None]:
    """Yields the deltas of all samples as they come. The first error ends all samples."""
    return samples[0].run() if len(samples) == 1 else _merged(samples)


async def _merged(samples: Sequence[Sample]) -> AsyncGenerator[tuple[Sample, Delta], None]:
    queue: asyncio.Queue[tuple[Sample, Delta | Exception]] = asyncio.Queue(MAX_MERGED)
    tasks: list[asyncio.Task[None]] = []
    try:
        async for sample in in_turns(samples):
            tasks.append(asyncio.create_task(_pump(sample, queue)))  # noqa: PERF401  # `finally` must know each
        running = len(samples)
        while running:
            sample, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            running -= item.finish_reason is not None
            yield sample, item
    finally:
        for task in tasks:  # Before the await below, because the caller that closes this may not wait for it.
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(sample: Sample, queue: asyncio.Queue[tuple[Sample, Delta | Exception]]) -> None:
    try:
        async with aclosing(sample.run()) as deltas:
            async for item in deltas:
                await queue.put(item)
    except Exception as error:
        await queue.put((sample, error))


def _score_alone(delta: Delta) -> Delta:
    return Delta(prompt_logprobs=delta.prompt_logprobs, finish_reason="length")


class GeneratedAnswer:
    """The whole answer of one sample, joined from its deltas, whose bytes are counted meanwhile."""

    def __init__(self, sample: Sample) -> None:
        self.whole = Delta()
        self._sample = sample
        self._texts: list[str] = []
        self._logprobs = PackedLogprobs()
        self._num_counted = 0  # Bytes of the logprobs.

    def add(self, delta: Delta) -> None:
        """Adds the delta to the answer. Raises QueueFull if the caller's answers in progress become too large."""
        whole = self.whole
        self._texts.append(delta.text)
        whole.token_ids.extend(delta.token_ids)
        whole.embedding = delta.embedding or whole.embedding
        whole.offsets.extend(delta.offsets)
        if delta.logprobs is not None:
            whole.logprobs = self._logprobs
            self._logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            whole.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            whole.text = "".join(self._texts)
        self._count(delta)

    def _count(self, delta: Delta) -> None:
        num_bytes = TOKEN_BYTES * (len(delta.token_ids) + len(delta.offsets)) + len(delta.text) + len(delta.embedding)
        if delta.prompt_logprobs:
            num_bytes += LOGPROB_BYTES * count_logprobs(Delta(prompt_logprobs=delta.prompt_logprobs))
        packed = self._logprobs.num_bytes
        self._sample.keep(num_bytes + packed - self._num_counted)
        self._num_counted = packed


async def collect(samples: Sequence[Sample]) -> list[Delta]:
    """Returns every sample's whole answer, in the order of the samples.

    Raises InvalidRequest if the answers have more logprobs than one request may get, and QueueFull if those of the
    caller's requests in progress have too many bytes.
    """
    answers = {sample.index: GeneratedAnswer(sample) for sample in samples}
    num_values = 0
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            num_values += count_logprobs(delta)
            if num_values > MAX_ANSWER_LOGPROBS:
                raise InvalidRequest(
                    f"The answers have more than {MAX_ANSWER_LOGPROBS} logprobs in total, those of prompts and of the "
                    "best tokens included; that is the limit of one request without `stream`. Ask for fewer logprobs, "
                    "answers or tokens at a time, or set `stream` to true.",
                    "logprobs",
                )
            answers[sample.index].add(delta)
    return [answers[sample.index].whole for sample in samples]


def fallback_of(samples: Sequence[Sample]) -> dict[str, str] | None:
    """Returns the `lora_fallback` entry if the base model answered in an adapter's place, else None."""
    for sample in samples:
        if sample.fallback_reason is not None:
            return {"requested": sample.model.name, "reason": sample.fallback_reason}
    return None


def group_of(request_id: str, tasks: Sequence[Task], deadline: RequestDeadline, trace: Trace = NO_TRACE) -> SampleGroup:
    """Groups the samples of a request. Raises InvalidRequest if they are too many or their prompts are too long."""
    total = sum(task.params.n for task in tasks)
    if total > MAX_SAMPLES:
        raise InvalidRequest(f"prompts x n is {total}; at most {MAX_SAMPLES} answers are allowed in one request.", "n")
    num_tokens = sum(task.params.n * len(task.prompt.token_ids) for task in tasks)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompts of the {total} answers have {num_tokens} tokens in total, with each prompt counted n times; "
            f"at most {MAX_PROMPT_TOKENS} are allowed in one request. Ask for fewer answers at a time, or shorten the "
            "prompts.",
            "n",
        )
    num_scored = sum(
        task.params.n * len(task.prompt.token_ids) * (1 + task.params.prompt_logprobs)
        for task in tasks
        if task.params.prompt_logprobs is not None
    )
    if num_scored > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"the prompts of the {total} answers have {num_scored} logprobs in total, those of the best tokens "
            f"included; at most {MAX_ANSWER_LOGPROBS} are allowed in one request. Ask for fewer logprobs or answers, "
            "or send fewer or shorter prompts.",
            "prompt_logprobs",
        )
    num_listed = sum(task.params.n * task.params.num_listed_ids for task in tasks)
    if num_listed > MAX_LISTED_IDS:
        raise InvalidRequest(
            f"allowed_token_ids, bad_words, logit_bias and stop_token_ids have {num_listed} token ids in total, "
            f"counted once for each of the {total} answers; at most {MAX_LISTED_IDS} are allowed in one request. Ask "
            "for fewer answers at a time, or shorten the lists.",
            "n",
        )
    num_chars = sum(task.params.n * task.params.num_chars for task in tasks)
    if num_chars > MAX_SENT_CHARS:
        raise InvalidRequest(
            f"the format, `stop` and `bad_words` have {num_chars} characters in total, counted once for each of the "
            f"{total} answers; at most {MAX_SENT_CHARS} are allowed in one request. Ask for fewer answers at a time, "
            "or shorten these texts.",
            "n",
        )
    return SampleGroup(f"{request_id}-{next(_numbers)}", total, num_tokens, deadline, trace)


async def make_samples(
    state: AppState, request: Request, request_id: str, tasks: Sequence[Task], deadline: RequestDeadline
) -> list[Sample]:
    """Makes the samples of a request.

    Raises QuotaExceeded if the caller has used up its limits, and InvalidRequest if tokens are wanted from an adapter
    that has a classification head, or experts that this server does not record.
    """
    for task in tasks:
        if task.pooling is None and task.model.language.classifier is not None:
            check_generates(task.model.name, task.model.language.classifier.task)
    if any(task.returns_experts for task in tasks):
        lengths = [len(task.prompt.token_ids) + (task.params.max_tokens or 0) for task in tasks]
        check_routed(state.engine.hello, [n * task.params.n for n, task in zip(lengths, tasks, strict=True)])
    trace, access = trace_of(request), state.access
    group = replace(
        group_of(request_id, tasks, deadline, trace),
        is_stalled=is_stalled_of(request.scope),
        keep=partial(count_growth, request.scope),
    )
    access.meter.check_room()
    num_prompt_tokens = sum(len(task.prompt.token_ids) for task in tasks)
    admission = await access.quotas.admit_sequences(caller_of(request), group.num_sequences, num_prompt_tokens)
    add_admission(request.scope, admission)
    trace.describe(request_id, endpoint_of(request.scope), tasks[0].model, tasks[0].params, group.num_sequences)
    samples: list[Sample] = []
    async for task in in_turns(tasks):
        constrained = task.params.structured_outputs is not None
        tokenizer = await state.texts.tokenizer_file(task.model) if constrained else None
        async for i in in_turns(range(task.params.n)):
            params = task.params.of_sample(i)
            samples.append(Sample(state, group, len(samples), task, params, tokenizer, counts_prompt=i == 0))
    return samples


def usage_of(samples: Sequence[Sample]) -> dict[str, object]:
    """Returns the `usage` entry of the samples. A prompt counts once, however many samples it has."""
    asked = [sample for sample in samples if sample.counts_prompt]
    prompt = sum(len(sample.prompt.token_ids) for sample in asked)
    completion = sum(sample.num_tokens for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sample.num_cached_tokens for sample in asked)},
    }

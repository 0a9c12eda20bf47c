"""Runs the sequences of one request on the engine, and yields their outputs as they come.

There is one sequence for each prompt and sample, numbered prompt-major as OpenAI numbers choices. Closing a generator
of this module aborts its sequences.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission
from lorafleet.api.access.pacing import in_turns
from lorafleet.api.access.usage import TenantUsage, short_id
from lorafleet.api.front import Front, ServedModel
from lorafleet.api.request.prompts import Prompt
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.telemetry.endpoint import endpoint_of
from lorafleet.api.telemetry.http_metrics import Stopwatch
from lorafleet.api.text.output import Delta, OutputProcessor
from lorafleet.protocol.errors import EngineDead, InvalidRequest, LorafleetError
from lorafleet.protocol.limits import MAX_PROMPT_TOKENS, MAX_SAMPLES
from lorafleet.protocol.messages import EngineRequest, FinishReason, Pooling, SequenceTimes, TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams

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
    pooling: Pooling | None = None  # If set, an embedding is wanted instead of tokens.

    @property
    def salt(self) -> str:
        """The salt of the prefix cache in the engine. Two tenants share no block, nor do two salts of one tenant."""
        tenant = self.model.caller.tenant
        if tenant is None and self.cache_salt is None:
            return ""
        return hashlib.sha256(msgspec.json.encode((tenant, self.cache_salt))).hexdigest()


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one request of a client."""

    name: str  # Unique.
    num_sequences: int
    num_tokens: int  # Prompt tokens of all sequences together.


class Sample:
    """One sequence on the engine.

    Args:
        params: The sequence's own parameters, where n is 1.
        counts_prompt: True for the first sample of a prompt, with which the usage counts the prompt.
    """

    def __init__(
        self,
        front: Front,
        group: SampleGroup,
        index: int,
        task: Task,
        params: SamplingParams,
        deadline: RequestDeadline,
        tokenizer: TokenizerFile | None,
        *,
        counts_prompt: bool,
    ) -> None:
        self.index = index
        self.prompt = task.prompt
        self.model = task.model
        self.params = params
        self.counts_prompt = counts_prompt
        self.num_cached_tokens = 0
        self.fallback_reason = task.model.fallback_reason
        self._scoring = task.scoring
        self._priority, self._pooling = task.priority, task.pooling
        self._cache_salt = task.salt
        self._front = front
        self._group = group
        self._engine_id = f"{group.name}-{index}"
        self._deadline = deadline
        self.times: SequenceTimes | None = None  # Set from the first token on, if the request is traced.
        self.sent_s = 0.0  # When it was sent to the engine, in seconds of time.monotonic().
        self._tokenizer = tokenizer
        self._label = front.count_sequence(task.model)
        self._ended: FinishReason = "abort"
        self._counted = False
        self._processor = OutputProcessor(task.model.tokenizer, self.prompt.token_ids, params)

    @property
    def num_tokens(self) -> int:
        return 0 if self._scoring else self._processor.num_tokens

    async def run(self) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of the answer. The last one has a finish_reason."""
        request = EngineRequest(
            request_id=self._engine_id,
            prompt_token_ids=self.prompt.token_ids,
            params=self.params,
            lora=self.model.lora,
            vocabulary=self.model.language.vocabulary,
            language=self.model.language.digest,
            group=self._group.name,
            group_sequences=self._group.num_sequences,
            group_tokens=self._group.num_tokens,
            queue_timeout_s=self._deadline.left_s(),
            cache_salt=self._cache_salt,
            tenant=self.model.caller.tenant or "",
            traced=self._deadline.trace is not None,
            priority=self._priority,
            pooling=self._pooling,
            tokenizer=self._tokenizer,
        )
        push = self._processor.push
        watch = Stopwatch()
        self.sent_s = time.monotonic()
        try:
            async with aclosing(self._front.engine.generate(request)) as outputs:
                async for output in outputs:
                    if output.token_ids or output.embedding:
                        if watch.first is None:
                            tier = "remote" if self.model.fetched and output.tier else output.tier
                            watch.lora_rank, watch.tier = output.lora_rank, tier
                            self._front.metrics.count_start(self._label, output.queue_s, tier)
                        watch.tick()
                    if output.times is not None:
                        self.times = output.times
                    delta = push(output)
                    if delta.num_cached_tokens or delta.fallback_reason:
                        self._note_facts(delta)
                    if delta.finish_reason is not None:
                        self._ended = delta.finish_reason
                        self._count(watch)  # Before the client gets the end, so that every answer is metered.
                    yield _score_alone(delta) if self._scoring else delta
                    if delta.finish_reason is not None:
                        return
            raise EngineDead(f"the engine ended request {self._engine_id} without an answer")
        except LorafleetError as error:
            self._ended = "error"
            self._front.failures.note(error, self._adapter, self.model.caller.tenant)
            raise
        finally:
            self._count(watch)

    @property
    def _adapter(self) -> str:
        """The adapter's name in the request, or "" for the base model."""
        return self.model.lora.lora_name if self.model.lora is not None else ""

    def _note_facts(self, delta: Delta) -> None:
        if delta.fallback_reason:
            self._front.failures.add("FellBackToBase", delta.fallback_reason, self._adapter, self.model.caller.tenant)
        self.num_cached_tokens = delta.num_cached_tokens or self.num_cached_tokens
        self.fallback_reason = delta.fallback_reason or self.fallback_reason

    def _count(self, watch: Stopwatch) -> None:
        """Counts the sequence in metrics, quotas and usage, once, however it ended."""
        if self._counted:
            return
        self._counted = True
        num_prompt = len(self.prompt.token_ids) if self.counts_prompt else 0
        self._front.metrics.count_sequence(self._label, num_prompt, self.num_tokens, watch, self._ended)
        self._front.recent.count(
            self.model.caller.tenant,
            self._adapter,
            num_prompt,
            self.num_tokens,
            watch.first,
            failed=self._ended == "error",
        )
        self._front.history.count(
            self.model.caller.tenant,
            self._adapter,
            num_prompt,
            self.num_tokens,
            watch.first,
            watch.last - watch.started,
            failed=self._ended == "error",
        )
        if self._deadline.trace is not None:
            self._deadline.trace.sequence_ended(self, watch, self._ended)
        num_unserved = num_prompt if watch.first is None else 0  # It was rejected or aborted before it started.
        if self._front.quotas is not None:
            self._front.quotas.charge(self.model.caller, self.num_tokens - num_unserved)
        if self._front.meter is not None:
            self._front.meter.add(self._usage(num_prompt - num_unserved))

    def _usage(self, num_prompt: int) -> TenantUsage:
        caller, lora, fell_back = self.model.caller, self.model.lora, self.fallback_reason is not None
        return TenantUsage(
            time.time(),
            short_id(self._group.name),
            caller.tenant or "",
            caller.key_id,
            "" if lora is None else lora.lora_name,
            "" if lora is None or fell_back else lora.digest,
            num_prompt,
            self.num_cached_tokens if num_prompt else 0,
            self.num_tokens,
            self._ended,
            fell_back,
        )


async def merged(samples: Sequence[Sample]) -> AsyncGenerator[tuple[Sample, Delta], None]:
    """Yields the deltas of all samples as they come. The first error ends all samples."""
    if len(samples) == 1:
        sample = samples[0]
        async with aclosing(sample.run()) as deltas:
            async for delta in deltas:
                yield sample, delta
        return
    queue: asyncio.Queue[tuple[Sample, Delta | Exception]] = asyncio.Queue()
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
            async for delta in deltas:
                queue.put_nowait((sample, delta))
    except Exception as error:
        queue.put_nowait((sample, error))


def _score_alone(delta: Delta) -> Delta:
    return Delta(prompt_logprobs=delta.prompt_logprobs, finish_reason="length")


class GeneratedAnswer:
    """The whole answer of one sample, joined from its deltas."""

    def __init__(self) -> None:
        self.whole = Delta()
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        whole = self.whole
        self._texts.append(delta.text)
        whole.token_ids.extend(delta.token_ids)
        whole.embedding = delta.embedding or whole.embedding
        whole.offsets.extend(delta.offsets)
        if delta.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            whole.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            whole.text = "".join(self._texts)


async def collect(samples: Sequence[Sample]) -> list[Delta]:
    """Returns every sample's whole answer, in the order of the samples."""
    answers = {sample.index: GeneratedAnswer() for sample in samples}
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            answers[sample.index].add(delta)
    return [answers[sample.index].whole for sample in samples]


def fallback_of(samples: Sequence[Sample]) -> dict[str, str] | None:
    """Returns the `lora_fallback` entry if the base model answered in an adapter's place, else None."""
    for sample in samples:
        if sample.fallback_reason is not None:
            return {"requested": sample.model.name, "reason": sample.fallback_reason}
    return None


def group_of(request_id: str, tasks: Sequence[Task]) -> SampleGroup:
    """Groups the samples of a request. Raises InvalidRequest if they are too many or their prompts are too long."""
    total = sum(task.params.n for task in tasks)
    if total > MAX_SAMPLES:
        raise InvalidRequest(f"prompts x n is {total}; at most {MAX_SAMPLES} answers in one request.", "n")
    num_tokens = sum(task.params.n * len(task.prompt.token_ids) for task in tasks)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompts of the {total} answers have {num_tokens} tokens together, each prompt counted n times; at "
            f"most {MAX_PROMPT_TOKENS} in one request. Ask for fewer answers at a time, or shorten the prompts.",
            "n",
        )
    return SampleGroup(f"{request_id}-{next(_numbers)}", total, num_tokens)


async def make_samples(
    front: Front, request: Request, request_id: str, tasks: Sequence[Task], deadline: RequestDeadline
) -> list[Sample]:
    """Makes the samples of a request. Raises QuotaExceeded if the caller has used up its limits."""
    group = group_of(request_id, tasks)
    total = group.num_sequences
    if front.meter is not None:
        front.meter.check_room()
    if front.quotas is not None:
        num_prompt_tokens = sum(len(task.prompt.token_ids) for task in tasks)
        admission = await front.quotas.admit_sequences(caller_of(request), total, num_prompt_tokens)
        if admission is not None:
            add_admission(request.scope, admission)
    if deadline.trace is not None:
        deadline.trace.describe(request_id, endpoint_of(request.scope), tasks)
    samples: list[Sample] = []
    async for task in in_turns(tasks):
        constrained = task.params.structured_outputs is not None
        tokenizer = await front.tokenizer_file(task.model) if constrained else None
        async for i in in_turns(range(task.params.n)):
            params = task.params.of_sample(i)
            sample = Sample(front, group, len(samples), task, params, deadline, tokenizer, counts_prompt=i == 0)
            samples.append(sample)
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

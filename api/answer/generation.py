"""Runs one request's sequences on the engine and gives what they answer, as it comes.

One sequence a prompt and sample, numbered prompt-major as OpenAI numbers choices. Closing a generator from here aborts
its sequences.
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
from lorafleet.api.access.usage import Usage, short_id
from lorafleet.api.front import Front, ServedModel
from lorafleet.api.request.prompts import Prompt
from lorafleet.api.request.request_deadline import Deadline
from lorafleet.api.telemetry.endpoint import endpoint_of
from lorafleet.api.telemetry.http_metrics import Stopwatch
from lorafleet.api.text.output import Delta, OutputProcessor
from lorafleet.protocol.errors import EngineDead, InvalidRequest, LorafleetError
from lorafleet.protocol.limits import MAX_PROMPT_TOKENS, MAX_SAMPLES
from lorafleet.protocol.messages import EngineRequest, FinishReason, Pooling, SequenceTimes, TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams

_numbers = itertools.count()  # clients may give two requests one id; the engine needs them apart


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and what to do with it. params.n: how many samples to make of it. cache_salt: the client's own.

    scoring: only the prompt's logprobs are wanted. The engine makes one token, which is not shown.
    pooling: an embedding is wanted, and no token.
    """

    prompt: Prompt
    model: ServedModel
    params: SamplingParams
    scoring: bool = False
    cache_salt: str | None = None
    priority: int = 0
    pooling: Pooling | None = None

    @property
    def salt(self) -> str:
        """What the engine salts the prefix cache with: no two tenants share a block, nor two salts of one tenant."""
        tenant = self.model.caller.tenant
        if tenant is None and self.cache_salt is None:
            return ""
        return hashlib.sha256(msgspec.json.encode((tenant, self.cache_salt))).hexdigest()


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one client's request."""

    name: str  # Unique.
    num_sequences: int
    num_tokens: int  # Of their prompts together.


class Sample:
    """One sequence. `params` are its own: n is 1.
    `counts_prompt`: it is its prompt's first, which the usage counts."""

    def __init__(
        self,
        front: Front,
        group: SampleGroup,
        index: int,
        task: Task,
        params: SamplingParams,
        deadline: Deadline,
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
        self.times: SequenceTimes | None = None  # where it is traced, from its first token on
        self.sent_s = 0.0  # monotonic, when it was given to the engine
        self._tokenizer = tokenizer
        self._label = front.count_sequence(task.model)
        self._ended: FinishReason = "abort"
        self._counted = False
        self._processor = OutputProcessor(task.model.tokenizer, self.prompt.token_ids, params)

    @property
    def num_tokens(self) -> int:
        return 0 if self._scoring else self._processor.num_tokens

    async def run(self) -> AsyncGenerator[Delta, None]:
        """Ends after the delta with a finish_reason."""
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
                        self._count(watch)  # before the client hears the end: what it was answered is metered
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
        """The name that the request called it by; "" for the base."""
        return self.model.lora.lora_name if self.model.lora is not None else ""

    def _note_facts(self, delta: Delta) -> None:
        if delta.fallback_reason:
            self._front.failures.add("FellBackToBase", delta.fallback_reason, self._adapter, self.model.caller.tenant)
        self.num_cached_tokens = delta.num_cached_tokens or self.num_cached_tokens
        self.fallback_reason = delta.fallback_reason or self.fallback_reason

    def _count(self, watch: Stopwatch) -> None:
        """Once, however it ended."""
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
        if self._deadline.trace is not None:
            self._deadline.trace.sequence_ended(self, watch, self._ended)
        num_unserved = num_prompt if watch.first is None else 0  # it was refused, or left, before it began
        if self._front.quotas is not None:
            self._front.quotas.charge(self.model.caller, self.num_tokens - num_unserved)
        if self._front.meter is not None:
            self._front.meter.add(self._usage(num_prompt - num_unserved))

    def _usage(self, num_prompt: int) -> Usage:
        caller, lora, fell_back = self.model.caller, self.model.lora, self.fallback_reason is not None
        return Usage(
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
    """Every sample's deltas as they come. The first error ends all."""
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
        for task in tasks:  # at once: who ends this may not wait for it
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


class Answer:
    """All that one sample answered, for responses that are not streamed."""

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
    """Every sample's whole answer, in their order."""
    answers = {sample.index: Answer() for sample in samples}
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            answers[sample.index].add(delta)
    return [answers[sample.index].whole for sample in samples]


def fallback_of(samples: Sequence[Sample]) -> dict[str, str] | None:
    """What a response says where the base model answered in an adapter's place."""
    for sample in samples:
        if sample.fallback_reason is not None:
            return {"requested": sample.model.name, "reason": sample.fallback_reason}
    return None


def group_of(request_id: str, tasks: Sequence[Task]) -> SampleGroup:
    """Raises InvalidRequest where all samples together are too many, or their prompts too long."""
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
    front: Front, request: Request, request_id: str, tasks: Sequence[Task], deadline: Deadline
) -> list[Sample]:
    """Raises QuotaExceeded where the caller has used up what it may ask for."""
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
    """A prompt counts once, however many samples it has."""
    asked = [sample for sample in samples if sample.counts_prompt]
    prompt = sum(len(sample.prompt.token_ids) for sample in asked)
    completion = sum(sample.num_tokens for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sample.num_cached_tokens for sample in asked)},
    }

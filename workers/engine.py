"""Turns requests into tokens, one step at a time. The engine is single-threaded and knows nothing of sockets or texts.

One step takes in finished adapter loads, lets the scheduler choose, launches the model, and returns tokens. If steps
overlap, these are the tokens of the step before, so that the host's work is hidden behind the device's. A sequence
then goes on before the host knows its last token, which the device stores. Tokens computed beyond its end are dropped.
"""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass

from lorafleet.protocol.engine_config import OnLoadFailure
from lorafleet.protocol.errors import AdapterChanged, ContextOverflow, InvalidRequest, LorafleetError, fault_of, to_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.messages import (
    EngineHello,
    EngineRequest,
    EngineStats,
    FinishReason,
    SequenceTimes,
    TokenOutput,
)
from lorafleet.protocol.sampling_params import check_token_ids
from lorafleet.protocol.step_metrics import StepMetrics
from lorafleet.resolvers.fetch_metrics import FetchTotals
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.memory import fixed_memory
from lorafleet.workers.schedule.admission import QueueAdmission
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.slots.worker_manager import LoadCounts, WorkerLoRAManager
from lorafleet.workers.step.runner import LaunchedStep, ModelRunner, Sampled
from lorafleet.workers.structured.decoding import StructuredDecoding

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that has been launched."""

    step: LaunchedStep
    ends: list[int]  # number of computed tokens of each chunk's sequence after the step
    began_s: float  # time.perf_counter()


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        structured: StructuredDecoding,
        hello: EngineHello,
        on_lora_load_failure: OnLoadFailure,
        seed: int,
        overlap: bool,
        max_queued_requests: int | None,
        max_queued_tokens: int | None,
    ) -> None:
        self.stalled = False  # the last step could do nothing, since every waiting request waits for its adapter
        self._overlap = overlap
        self._under_way: _UnderWay | None = None
        self.hello = hello
        self.scheduler = scheduler
        self.loras: WorkerLoRAManager | None = runner.loras
        self.runner = runner
        self._structured = structured
        self._admission = QueueAdmission(
            scheduler, max_queued_requests, max_queued_tokens, num_apart=lambda: len(self._preparing)
        )
        self._kv: KVCacheManager = scheduler.kv
        self._on_lora_load_failure = on_lora_load_failure
        self._seeds = random.Random(seed)
        self._sequences: dict[str, Sequence] = {}
        self._preparing: set[Sequence] = set()  # sequences whose grammars are being compiled
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._step_metrics = StepMetrics()
        self._fixed_memory = fixed_memory(runner.steps, None if self.loras is None else self.loras.slots)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._under_way is not None

    def add(self, request: EngineRequest) -> None:
        """Queues a request for the next steps. Raises LorafleetError and queues nothing if it can never be served, or
        not now."""
        self._check(request)
        eos = self.hello.eos_token_ids if request.vocabulary is None else request.vocabulary.eos_token_ids
        sequence = self._make_sequence(request, eos)
        sequence.group = self._admission.join(request)
        try:
            if self.loras is not None and request.lora is not None:
                sequence.tier = self.loras.count_request(request.lora, request.tenant)
            if request.params.structured_outputs is None:
                self.scheduler.add(sequence)
            else:
                self._prepare(sequence, request, eos)
        except BaseException:
            self._admission.left(sequence)
            raise
        self._sequences[request.request_id] = sequence
        self._admission.queued(sequence, request.queue_timeout_s)

    def _make_sequence(self, request: EngineRequest, eos_token_ids: list[int]) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        room = self.hello.max_model_len - len(prompt)
        return Sequence(
            request_id=request.request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            lora=request.lora,
            prompt_logprobs=[] if params.prompt_logprobs is not None else None,
            stop_ids=frozenset(() if params.ignore_eos else eos_token_ids) | frozenset(params.stop_token_ids or ()),
            own_vocabulary=request.vocabulary is not None,
            vocab_size=self.hello.vocab_size if request.vocabulary is None else request.vocabulary.size,
            priority=request.priority,
            pooling=request.pooling,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            times=SequenceTimes() if request.traced else None,
        )

    def abort(self, request_id: str) -> None:
        """Frees what the sequence holds, before the next step. Unknown ids belong to finished sequences."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._structured.leave(sequence)
            self.runner.release(sequence)
            if sequence in self._preparing:
                self._preparing.remove(sequence)
            else:
                self.scheduler.finish(sequence)
            self._admission.left(sequence)

    def load_adapter(self, lora: LoRARequest) -> Future[AdapterInfo]:
        if self.loras is None:
            refused: Future[AdapterInfo] = Future()
            refused.set_exception(InvalidRequest("this server runs without LoRA; start it with --enable-lora."))
            return refused
        return self.loras.load(lora)

    def pin_adapter(self, lora: LoRARequest) -> Future[AdapterInfo]:
        if self.loras is None:
            return self.load_adapter(lora)
        try:
            return self.loras.pin(lora)
        except LorafleetError as error:
            refused: Future[AdapterInfo] = Future()
            refused.set_exception(error)
            return refused

    def step(self) -> list[TokenOutput]:
        """Launches the next step. Returns the tokens of the step before if steps overlap, otherwise its own."""
        began_s = time.perf_counter()
        outputs = self._take_in_loads() + self._take_in_grammars()
        if self._under_way is not None and not self._may_run_ahead():
            outputs += self._choose() + self._collect()
        chunks = self.scheduler.schedule()
        outputs += [self._refuse(sequence, error) for sequence, error in self._admission.expired()]
        self.stalled = not chunks and self._under_way is None
        if self.stalled:
            return outputs
        runs_ahead = self._under_way is not None
        plan = self._plan(chunks)
        outputs += self._choose()  # as late as possible, since masks are computed meanwhile
        remaining = self._remaining(chunks)
        if len(remaining) < len(chunks):
            chunks = remaining
            plan = self._plan(chunks)
        if not runs_ahead:
            self._structured.start([chunk.sequence for chunk in chunks if chunk.samples])
        launched = self._launch(chunks, plan, began_s) if plan is not None else None
        outputs += self._collect()
        self._under_way = launched
        if launched is not None:
            outputs += self._refuse_faulty(launched.step)
        if runs_ahead and launched is not None:
            # while it runs, since the tokens before it are known only now
            self._structured.start(launched.step.sampling)
        if not self._overlap:
            outputs += self._choose() + self._collect()
        return outputs

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._sequences)

    @property
    def num_adapter_moves(self) -> int:
        """Number of moves of adapters between tiers so far."""
        if self.loras is None:
            return 0
        return self.loras.counts.loads + self.loras.slots.num_activations + self.loras.slots.num_evictions

    def stats(self) -> EngineStats:
        slots = self.loras.slots if self.loras is not None else None
        counts = self.loras.counts if self.loras is not None else LoadCounts()
        fetched = self.loras.fetched if self.loras is not None else FetchTotals()
        resident = [s.digest or "" for s in slots.slots] if slots is not None else []
        cpu = self.loras.resident_cpu() if self.loras is not None else []
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self._preparing) + self.scheduler.num_aside,
            running_tokens=sum(len(sequence.tokens) for sequence in self.scheduler.running),
            waiting_tokens=self.scheduler.waiting.num_tokens,
            kv_blocks_total=self._kv.num_blocks,
            kv_blocks_free=self._kv.num_free,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_cache_queries_total=self._kv.query_tokens,
            prefix_cache_hits_total=self._kv.hit_tokens,
            preemptions_total=self.scheduler.num_preemptions,
            refused_total=dict(self._admission.refused),
            steps_total=self._step_metrics.num_steps,
            steps=self._step_metrics.told(self.runner.steps_on_gpu()),
            memory_bytes=self._memory(),
            lora_slots_total=len(slots.slots) if slots is not None else 0,
            lora_slots_used=sum(map(bool, resident)),
            lora_slots_idle=slots.num_idle if slots is not None else 0,
            lora_slots_pinned=slots.num_pinned if slots is not None else 0,
            lora_adapters_wanted=len({s.lora.digest for s in self._sequences.values() if s.lora is not None}),
            lora_cpu_adapters=len(cpu),
            lora_loads_total=counts.loads,
            lora_load_failures_total=counts.failures,
            lora_load_seconds_total=counts.seconds,
            lora_fetches_total=fetched.fetched,
            lora_fetch_failures_total=fetched.failed,
            lora_fetched_bytes_total=fetched.num_bytes,
            lora_activations_total=slots.num_activations if slots is not None else 0,
            lora_evictions_total=slots.num_evictions if slots is not None else 0,
            lora_cpu_evictions_total=counts.cpu_evictions,
            lora_slot_bytes=slots.num_bytes if slots is not None else 0,
            lora_cpu_bytes=self.loras.cpu_bytes if self.loras is not None else 0,
            waiting_adapters=[lora.digest for lora in self.scheduler.waiting_adapters()[0]],
            resident_slots=resident,
            resident_cpu=cpu,
        )

    def _memory(self) -> dict[str, int]:
        memory = self._fixed_memory | {"penalties": self.runner.counts_bytes}
        if self.loras is None:
            return memory
        extra = self.loras.slots.extra_memory.num_bytes * self.runner.steps.model.group.size
        return memory | {"lora_extra": extra, "lora_cpu": self.loras.cpu_bytes}

    def close(self) -> None:
        self._structured.close()
        if self.loras is not None:
            self.loras.close()
        self.runner.close()

    def _prepare(self, sequence: Sequence, request: EngineRequest, eos_token_ids: list[int]) -> None:
        assert request.tokenizer is not None, "who asks for structured output says how the model spells its answers"
        base = request.vocabulary is None and not request.language
        group = turn_group(request.tenant, request.lora)
        self._structured.open(sequence, request.tokenizer, eos_token_ids, group, base=base)
        self._preparing.add(sequence)

    def _check(self, request: EngineRequest) -> None:
        prompt, limit = request.prompt_token_ids, self.hello.max_model_len
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use by a request in flight.", "request_id")
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; give at least one.", "prompt")
        if len(prompt) >= limit:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens; this server's limit for prompt and answer together is "
                f"{limit}. Shorten the prompt to at most {limit - 1} tokens, or raise max_model_len.",
                "prompt",
            )
        vocab_size = self.hello.vocab_size if request.vocabulary is None else request.vocabulary.size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < vocab_size)
            raise InvalidRequest(
                f"the prompt has token id {wrong}; this model's vocabulary has ids 0 to {vocab_size - 1}.", "prompt"
            )
        request.params.check_vocabulary(vocab_size)
        if request.vocabulary is not None:
            check_token_ids("eos_token_id", request.vocabulary.eos_token_ids, vocab_size)
        if request.lora is not None and self.loras is None:
            raise InvalidRequest("this server runs without LoRA; start it with --enable-lora.", "model")
        assert request.lora is None or request.lora.digest, "adapters are read once before they are requested"
        self._check_language(request, vocab_size)

    def _check_language(self, request: EngineRequest, vocab_size: int) -> None:
        """Raises AdapterChanged if the tokenizer in the adapter's folder has changed since the adapter was loaded.

        The front end reads the tokenizer by itself. An adapter that is still to be loaded has its digest checked then.
        A mix is not checked, since it has its parts' tokenizers.
        """
        if request.lora is None or request.lora.parts or self.loras is None:
            return
        info = self.loras.info(request.lora.digest)
        if info is None or (info.language, info.vocab_size or self.hello.vocab_size) == (request.language, vocab_size):
            return
        raise AdapterChanged(
            f"adapter {request.lora.lora_name!r}: the tokenizer's files in its folder are others than when it was "
            "loaded. Load it again (load_inplace) to serve the new version."
        )

    def _may_run_ahead(self) -> bool:
        """Returns whether the next step can be scheduled without the tokens of the one in flight."""
        return not self.scheduler.may_preempt

    def _plan(self, chunks: list[Chunk]) -> StepPlan | None:
        if not chunks:
            return None
        return self.runner.plan(chunks, self._under_way.step if self._under_way is not None else None)

    def _launch(self, chunks: list[Chunk], plan: StepPlan, began_s: float) -> _UnderWay:
        step = self.runner.launch(chunks, plan)
        self.scheduler.launched(chunks)
        return _UnderWay(step, [chunk.sequence.num_computed for chunk in chunks], began_s)

    def _refuse_faulty(self, step: LaunchedStep) -> list[TokenOutput]:
        """Ends the sequences whose sampling could not be prepared. What the step computes for them is dropped."""
        for sequence, error in step.faults:
            log.error("request %s ends", sequence.request_id, exc_info=error)
        live = [(s, error) for s, error in step.faults if self._is_here(s)]
        return [self._refuse(sequence, fault_of(error)) for sequence, error in live]

    def _choose(self) -> list[TokenOutput]:
        """Queues the choice of the tokens in flight if it waits for masks. Returns the rejections."""
        if self._under_way is None or self._under_way.step.choice is not None:
            return []
        masked = self._structured.finish()
        self.runner.choose(self._under_way.step, masked.masks, masked.late)
        return [self._refuse(s, error) for s, error in masked.faults if self._is_here(s)]

    def _remaining(self, chunks: list[Chunk]) -> list[Chunk]:
        """Returns the chunks of the next step that can still be computed. Their sequences have not ended, and get
        their tokens from the step in flight."""
        late = set(self._under_way.step.late) if self._under_way is not None else set()
        return [c for c in chunks if self._is_here(c.sequence) and c.sequence not in late]

    def _is_here(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request_id) is sequence

    def _collect(self) -> list[TokenOutput]:
        """Returns the tokens of the step in flight. Those of sequences that have ended meanwhile are dropped."""
        if self._under_way is None:
            return []
        under_way, self._under_way = self._under_way, None
        outputs: list[TokenOutput] = []
        for chunk, end, sampled in zip(under_way.step.chunks, under_way.ends, under_way.step.collect(), strict=True):
            if self._is_here(chunk.sequence):
                outputs += self._advance_or_refuse(chunk.sequence, end, sampled)
        for sequence in under_way.step.late:
            if self._is_here(sequence):
                self.scheduler.set_aside(sequence)  # until its mask has arrived, see _take_in_grammars()
        self._step_metrics.ended(under_way.step.shape, under_way.began_s)
        return outputs

    def _take_in_loads(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        if self.loras is None:
            return outputs
        for digest, error in self.loras.poll():
            waiting = [s for s in self.scheduler.waiting if s.lora is not None and s.lora.digest == digest]
            outputs += [output for s in waiting if (output := self._without_adapter(s, error)) is not None]
        return outputs

    def _take_in_grammars(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for sequence, error in self._structured.poll():
            if error is not None:
                outputs.append(self._refuse(sequence, error))
            elif sequence in self._preparing:
                self._preparing.remove(sequence)
                self.scheduler.add(sequence)
            else:
                self.scheduler.resume(sequence)
        return outputs

    def _without_adapter(self, sequence: Sequence, error: LorafleetError) -> TokenOutput | None:
        may_fall_back = sequence.num_generated == 0 and not sequence.own_vocabulary
        if self._on_lora_load_failure == "base" and may_fall_back:
            sequence.lora, sequence.fallback_reason = None, to_wire(error).message
            return None
        return self._refuse(sequence, error)

    def _refuse(self, sequence: Sequence, error: LorafleetError) -> TokenOutput:
        self.abort(sequence.request_id)
        return TokenOutput(request_id=sequence.request_id, finish_reason="error", error=to_wire(error))

    def _advance_or_refuse(self, sequence: Sequence, end: int, sampled: Sampled) -> list[TokenOutput]:
        """Returns the sequence's outputs. A fault of one sequence ends that sequence and no other."""
        try:
            output = self._advance(sequence, end, sampled)
        except Exception as error:
            log.exception("request %s ends", sequence.request_id)
            return [self._refuse(sequence, fault_of(error))]
        return [] if output is None else [output]

    def _advance(self, sequence: Sequence, end: int, sampled: Sampled) -> TokenOutput | None:
        """Takes in what a step computed for a sequence. Returns its output, or None if no token was sampled.

        `end` is the number of the sequence's tokens that the step had computed. The sampled token comes behind them.
        """
        self.scheduler.commit(sequence, end)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += sampled.prompt
        if sampled.token is None:
            return None
        assert sequence.tokens[end] == UNKNOWN
        sequence.tokens[end] = sampled.token
        num_generated = end + 1 - sequence.num_prompt
        pools = sequence.pooling is not None  # it has sampled a token all the same, which is dropped
        self._generation_tokens += not pools
        output = TokenOutput(
            request_id=sequence.request_id,
            token_ids=[] if pools else [sampled.token],
            embedding=sampled.embedding,
            logprobs=[sampled.logprobs] if sampled.logprobs is not None else None,
            finish_reason=self._finish_reason(sequence, sampled.token, num_generated),
        )
        if num_generated == 1:
            self._prompt_tokens += sequence.num_prompt
            output.num_cached_tokens = sequence.num_cached
            output.queue_s = sequence.started_s - sequence.queued_s
            output.tier = sequence.tier
            output.lora_rank = self._rank_of(sequence)
            output.fallback_reason = sequence.fallback_reason
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs = [None, *sequence.prompt_logprobs]
        if sequence.times is not None and (num_generated == 1 or output.finish_reason is not None):
            output.times = _noted(sequence, sequence.times, output.finish_reason)
        if output.finish_reason is not None:
            if output.finish_reason == "stop":
                output.stop_token_id = sampled.token
            self.abort(sequence.request_id)
        return output

    def _rank_of(self, sequence: Sequence) -> int:
        """Returns the rank of the sequence's adapter, or 0 for the base."""
        if sequence.slot is None or self.loras is None:
            return 0
        adapter = self.loras.slots.slots[sequence.slot].adapter
        assert adapter is not None, "a sequence holds its slot until it ends"
        return adapter.info.rank

    def _finish_reason(self, sequence: Sequence, token: int, num_generated: int) -> FinishReason | None:
        if token in sequence.stop_ids and num_generated >= sequence.params.min_tokens:
            return "stop"
        return "length" if num_generated >= sequence.max_tokens else None


def _noted(sequence: Sequence, times: SequenceTimes, finish_reason: FinishReason | None) -> SequenceTimes:
    """Records the times of a sequence at its first token and at its last."""
    now = time.monotonic()
    times.queued_s, times.started_s = sequence.queued_s, sequence.started_s
    times.first_s = times.first_s or now
    times.ended_s = 0.0 if finish_reason is None else now
    return times

"""Turns requests into tokens, one step at a time. The engine is single-threaded and knows nothing of sockets or texts.

One step takes in finished adapter loads, lets the scheduler choose, launches the model, and returns tokens. If steps
overlap, these are the tokens of the step before, so that the host's work is hidden behind the device's. A sequence
then goes on before the host knows its last token, which the device stores. Tokens computed beyond its end are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future

from lorafleet.protocol.engine_config import OnLoadFailure
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import InvalidRequest, LorafleetError, fault_of, to_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineHello, EngineRequest, EngineStats, TokenOutput
from lorafleet.workers.adapter_requests import AdapterRequests
from lorafleet.workers.answer_progress import AnswerProgress
from lorafleet.workers.engine_controls import EngineControls
from lorafleet.workers.engine_statistics import EngineStatistics
from lorafleet.workers.pending_grammars import PendingGrammars
from lorafleet.workers.request_intake import RequestIntake
from lorafleet.workers.schedule.admission import QueueAdmission
from lorafleet.workers.schedule.prompts_ahead import computes_prompts
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.speculation.ahead_pace import WAITED
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.step.interruption import IsInterrupted, never
from lorafleet.workers.step.runner import ModelRunner, Sampled
from lorafleet.workers.step.step_pipeline import StepPipeline
from lorafleet.workers.step_outputs import StepOutputs
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.weak_method import weak

log = logging.getLogger(__name__)


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
        self.hello = hello
        self.runner = runner
        self.scheduler = scheduler
        self.stalled = False  # the last step could do nothing, since every waiting request waits for its adapter
        self.pipeline = StepPipeline(runner, structured, scheduler)
        self._overlap = overlap
        self._structured = structured
        self._pending = PendingGrammars(structured, scheduler)
        self._intake = RequestIntake(hello, runner.memory.base, runner.loras, seed)
        self._admission = QueueAdmission(
            scheduler, max_queued_requests, max_queued_tokens, num_apart=self._pending.__len__
        )
        self._adapters = AdapterRequests(runner.loras, scheduler, on_lora_load_failure)
        self._answers = AnswerProgress(scheduler, runner.loras)
        self.statistics = EngineStatistics(runner, scheduler, self._admission, self._answers)
        self._sequences: dict[str, Sequence] = {}  # unfinished ones, by request id
        self._controls = EngineControls(
            scheduler,
            self.pipeline,
            self._intake,
            self._admission,
            self._pending,
            self._sequences,
            weak(self.abort),
            runner,
        )

    @property
    def loras(self) -> WorkerLoRAManager | None:
        return self.runner.loras

    @property
    def _speculation(self) -> Speculation | None:
        return self.scheduler.speculation

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.pipeline.has_step or self._controls.has_work

    @property
    def fills_idle_time(self) -> bool:
        """Whether step() has something to do at once though there is no work."""
        return self.runner.steps.late.fills_idle_time

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._sequences)

    def stats(self) -> EngineStats:
        return self.statistics.read(self._sequences.values(), len(self._pending))

    def add(self, request: EngineRequest) -> None:
        """Queues a request for the next steps. Raises LorafleetError and queues nothing if it can never be served, or
        not now."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use by an unfinished request.", "request_id")
        self._intake.check(request)
        sequence = self._intake.make_sequence(request)
        sequence.group = self._admission.join(request)
        try:
            if self.loras is not None and request.lora is not None:
                sequence.tier = self.loras.count_request(request.lora, request.tenant)
            if request.params.structured_outputs is None:
                self.scheduler.add(sequence)
            else:
                self._pending.add(sequence, request, self._intake.eos_token_ids(request))
        except BaseException:
            self._admission.left(sequence)
            raise
        self._sequences[request.request_id] = sequence
        self._admission.queued(sequence, request.queue_timeout_s)

    def abort(self, request_id: str) -> None:
        """Frees what the sequence holds, before the next step. Unknown ids belong to finished sequences."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.ended = True
            self._structured.leave(sequence)
            self.runner.release(sequence)
            if self._speculation is not None:
                self._speculation.release(sequence)
            if not self._pending.discard(sequence):
                self.scheduler.finish(sequence)
            self._admission.left(sequence)

    def load_adapter(self, lora: LoRARequest) -> Future[AdapterInfo]:
        return self._adapters.load(lora)

    def pin_adapter(self, lora: LoRARequest) -> Future[AdapterInfo]:
        return self._adapters.pin(lora)

    def control(self, control: EngineControl) -> Future[None]:
        """Takes an order that concerns all requests. The future is resolved by a later step().

        Raises InvalidRequest if it cannot be carried out.
        """
        return self._controls.take(control)

    def step(self, is_interrupted: IsInterrupted = never) -> StepOutputs:
        """Launches the next step. Returns the tokens of the step before if steps overlap, otherwise its own.

        Without work, it does what the start has left for idle time, and gives that up soon after is_interrupted() has
        become True.
        """
        self.runner.steps.late.run(is_idle=not self.has_work, is_interrupted=is_interrupted)
        outputs = self._advance()
        self._controls.answer()
        self.scheduler.memory.step_ended()
        return outputs

    def _advance(self) -> StepOutputs:
        began_s = time.perf_counter()
        outputs = StepOutputs(self._fail_all(self._adapters.poll()) + self._fail_all(self._pending.poll()))
        if self.pipeline.has_drafts:  # The device must count what it accepts before others can follow.
            outputs.others += self._choose()
        if self.pipeline.has_step and (
            self.scheduler.may_preempt
            or self.scheduler.memory.awaits_snapshot(self.scheduler.running)
            or self._controls.must_settle
            or self._drafts_need_tokens()
        ):
            outputs.others += self._choose()
            self._collect(outputs)
        ended, unswitched = self._controls.carry_out()
        outputs.others += ended + self._fail_all(unswitched)
        chunks = self.scheduler.schedule(self.pipeline.chunks)
        outputs.others += self._fail_all(self._admission.expired())
        self.stalled = not chunks and not self.pipeline.has_step
        if self.stalled:
            if self._speculation is not None:
                self._speculation.times.nothing_to_launch()
            return outputs
        planned = self.pipeline.plan(chunks, None if self._speculation is None else self._speculation.unknown)
        outputs.others += self._choose()  # as late as possible, since masks are computed meanwhile
        faults = self.pipeline.launch(planned, began_s)
        if self._speculation is not None:
            self._speculation.launched(chunks, self.pipeline.launched_s)
        self._collect(outputs)
        outputs.others += self._fail_unprepared(faults)
        self.pipeline.request_masks()
        if not self._overlap:
            outputs.others += self._choose()
            self._collect(outputs)
        return outputs

    def close(self) -> None:
        self._structured.close()
        if self.loras is not None:
            self.loras.close()
        self.scheduler.memory.close()
        self.runner.close()

    def _choose(self) -> list[TokenOutput]:
        """Queues the choice of the tokens in flight. Returns the outputs of sequences that fail."""
        return self._fail_all(self.pipeline.choose())

    def _collect(self, outputs: StepOutputs) -> None:
        """Adds the tokens of the step in flight to the outputs. Those of sequences that have ended meanwhile are
        dropped."""
        step = self.pipeline.collect()
        if step is None:
            return
        due = self._answers.advance_quiet(step.chunks, step.ends, step.plain, outputs.plain)
        num_plain = len(step.plain)
        for i in (*due, *range(num_plain, len(step.chunks))):
            chunk, end = step.chunks[i], step.ends[i]
            sampled = Sampled([step.plain[i]]) if i < num_plain else step.sampled[i - num_plain]
            sequence = chunk.sequence
            if sequence.ended:
                continue
            try:
                num_drafts = step.num_drafts(chunk) if chunk.drafts else 0
                if num_drafts and sampled.tokens and self._speculation is not None:
                    self._speculation.verified(sequence, num_drafts, len(sampled.tokens) - 1)
                output = self._answers.advance(sequence, end, sampled, num_drafts, len(chunk.drafts))
                if output is not None and output.finish_reason is not None:
                    self.abort(sequence.request_id)
            except Exception as error:  # a fault of one sequence ends that sequence and no other
                log.exception("request %s has failed", sequence.request_id)
                output = self._fail(sequence, fault_of(error))
            if output is not None:
                outputs.others.append(output)
        for sequence in step.late:
            if not sequence.ended:
                self.scheduler.set_aside(sequence)  # until its mask has arrived, see PendingGrammars.poll()
        seconds = self.statistics.steps.ended(step.shape, step.began_s)
        if self._speculation is not None:
            num_drafts = step.num_planned_drafts
            way = step.drafted_way if num_drafts else WAITED
            seconds = self._speculation.observe(step.shape, num_drafts, seconds, way)
        self.scheduler.budget.observe(step.shape, seconds)

    def _drafts_need_tokens(self) -> bool:
        """Returns whether drafts are in flight, or cannot be made before the tokens in flight are known."""
        if self._speculation is None:
            return False
        running = [] if computes_prompts(self.scheduler) else self.scheduler.running
        return self._speculation.needs_tokens(
            self.pipeline.chunks, running, self.scheduler.most_in_step, self.pipeline.verification
        )

    def _fail_unprepared(self, faults: list[tuple[Sequence, Exception]]) -> list[TokenOutput]:
        """Ends the sequences whose sampling could not be prepared."""
        for sequence, error in faults:
            log.error("request %s has failed", sequence.request_id, exc_info=error)
        return self._fail_all((sequence, fault_of(error)) for sequence, error in faults)

    def _fail_all(self, faults: Iterable[tuple[Sequence, LorafleetError]]) -> list[TokenOutput]:
        """Ends sequences that cannot go on, unless they have ended meanwhile. Returns their last outputs."""
        return [self._fail(sequence, error) for sequence, error in faults if not sequence.ended]

    def _fail(self, sequence: Sequence, error: LorafleetError) -> TokenOutput:
        self.abort(sequence.request_id)
        return TokenOutput(request_id=sequence.request_id, finish_reason="error", error=to_wire(error))

"""Carries out the orders of trainers to an engine: pauses, sleeps, aborts, and switches to new
weights.

An order takes effect between two steps. A switch needs every token of the last step, so the step in flight is collected
first. A switched sequence is computed again from its first token, so that none of its keys and values are those of the
former version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Literal

from lorafleet.protocol.engine_control import (
    AbortRequests,
    BoundQueue,
    EngineControl,
    FlushPrefixes,
    PauseEngine,
    PauseMode,
    ResumeEngine,
    SleepEngine,
    SupersedeAdapter,
    WakeEngine,
)
from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import TokenOutput
from lorafleet.workers.pending_grammars import PendingGrammars
from lorafleet.workers.request_intake import RequestIntake
from lorafleet.workers.schedule.admission import QueueAdmission
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.sleep.engine_sleep import EngineSleep
from lorafleet.workers.step.runner import ModelRunner
from lorafleet.workers.step.step_pipeline import StepPipeline
from lorafleet.workers.weak_method import weak


class EngineControls:
    """The orders of one engine.

    Args:
        sequences: All unfinished sequences, by request ID.
        abort: Ends a sequence, by its request ID.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        intake: RequestIntake,
        admission: QueueAdmission,
        pending: PendingGrammars,
        sequences: Mapping[str, Sequence],
        abort: Callable[[str], None],
        runner: ModelRunner,
    ) -> None:
        self._pause: PauseMode | Literal[""] = ""  # A sleep may demand another one meanwhile.
        self._sleep = EngineSleep(scheduler, runner, weak(self._end_all), weak(self._is_paused))
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._intake = intake
        self._admission = admission
        self._pending = pending
        self._sequences = sequences
        self._abort = abort
        self._switches: list[tuple[LoRARequest, Future[None]]] = []
        self._pauses: list[tuple[PauseMode, Future[None]]] = []  # Those whose condition does not hold yet.
        self._ended: list[TokenOutput] = []  # Last outputs of aborted sequences, for the next step.

    @property
    def must_settle(self) -> bool:
        """Whether the step in flight must be collected before carry_out()."""
        return bool(self._switches)

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do, though no sequence may run."""
        return bool(self._switches or self._ended) or self._sleep.awaits_copies

    def take(self, control: EngineControl) -> Future[None]:
        """Takes an order for the next step. The future is resolved in the engine loop's thread.

        Raises InvalidRequest if it cannot be carried out.
        """
        done: Future[None] = Future()
        match control:
            case PauseEngine(mode):
                self._pause = mode
                self._hold()
                self._pauses.append((mode, done))
                if mode == "abort":
                    self._end_all()
                return done
            case ResumeEngine():
                self._pause = ""
                self._hold()
            case SleepEngine() | WakeEngine():
                done = self._sleep.take(control)
                self._hold()
                return done
            case AbortRequests(prefix, tenant):
                self._end(
                    sequence
                    for sequence in self._sequences.values()
                    if sequence.request_id.startswith(prefix) and tenant in (None, sequence.tenant)
                )
            case SupersedeAdapter(lora, aborts):
                if not aborts:
                    self._switches.append((lora, done))
                    return done
                self._end(self._superseded_by(lora))
            case FlushPrefixes():
                self._scheduler.memory.flush()
            case BoundQueue(max_requests, max_tokens):
                self._admission.set_bounds(max_requests, max_tokens)
        done.set_result(None)
        return done

    def carry_out(self) -> tuple[list[TokenOutput], list[tuple[Sequence, LorafleetError]]]:
        """Carries out the switches. No step may be in flight then.

        Returns the last outputs of aborted sequences, and the sequences that cannot be switched.
        """
        ended, self._ended = self._ended, []
        faults: list[tuple[Sequence, LorafleetError]] = []
        switches, self._switches = self._switches, []
        for lora, done in switches:
            for sequence in self._superseded_by(lora):
                try:
                    self._switch(sequence, lora)
                except LorafleetError as error:
                    faults.append((sequence, error))
            done.set_result(None)
        return ended, faults

    def answer(self) -> None:
        """Answers the pauses whose condition holds now, and those that have been ended or replaced. Goes on with what
        a sleep or a wake-up has to do."""
        waiting, self._pauses = self._pauses, []
        for mode, done in waiting:
            if self._pause == mode and not self._is_paused(mode):
                self._pauses.append((mode, done))
            else:
                done.set_result(None)
        self._sleep.advance()
        self._hold()

    def _hold(self) -> None:
        self._scheduler.pause = self._sleep.hold or self._pause

    def _is_paused(self, mode: PauseMode) -> bool:
        if self._pipeline.has_step or self._ended:
            return False
        return mode == "keep" or not self._scheduler.num_started

    def _superseded_by(self, lora: LoRARequest) -> list[Sequence]:
        """Returns the sequences that use another version of this adapter by the same name, and whose clients do not
        demand to finish with it."""
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.lora is not None
            and sequence.lora.lora_name == lora.lora_name
            and sequence.lora.digest != lora.digest
            and sequence.pooling is None
            and _allows(sequence, lora)
        ]

    def _switch(self, sequence: Sequence, lora: LoRARequest) -> None:
        """Gives the sequence the new version, wherever it waits or runs. Raises AdapterChanged."""
        self._intake.check_switch(sequence, lora)
        change = partial(_change, sequence, lora)
        if sequence in self._pending:
            change()
            return
        if sequence.blocks is not None:
            self._scheduler.preempt(sequence)
        self._scheduler.waiting.change_digest(sequence, change)

    def _end_all(self) -> None:
        self._end(self._sequences.values())

    def _end(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            self._abort(sequence.request_id)
            self._ended.append(TokenOutput(request_id=sequence.request_id, finish_reason="abort"))


def _allows(sequence: Sequence, lora: LoRARequest) -> bool:
    """Returns whether the client's demand allows that a push switches or aborts the sequence. If not, the sequence
    finishes with its version."""
    assert sequence.lora is not None
    demand = sequence.version_demand
    return demand == "any" or (demand == "least" and lora.version >= sequence.lora.version)


def _change(sequence: Sequence, lora: LoRARequest) -> None:
    sequence.lora, sequence.switched = lora, True
    sequence.prefix = None  # It was found among blocks of the former version.
    sequence.first_adapted = 0

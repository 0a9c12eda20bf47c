"""Runs the steps of one engine in a pipeline, so that the host's work is hidden behind the device's.

The host launches a step before it has read the tokens of the step before, which the device stores:

    host     launch 1   choose 1   launch 2   collect 1   choose 2   launch 3   collect 2
    device              step 1 ...............            step 2 ...............

The same holds for a step behind one with drafts: the device knows how many it has accepted, and corrects what the next
step reads. Numbers of tokens that were recorded for that step count once the host knows them too. If the host has to
know these tokens to make the next drafts, the step is planned and prepared before, and launch() waits for them.

A step passes plan(), launch(), choose() and collect(), in this order. launch() chooses the tokens at once, unless they
need masks. Masks are computed by other processes beside the step, so choose() comes as late as it can. plan() then
queues all that the next step reads besides the tokens, so that after choose() only its graph is launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.ahead_pace import DraftedWay
from lorafleet.workers.speculation.awaited_drafts import AwaitedDrafts, MadeDrafts, UnknownDrafts
from lorafleet.workers.step.runner import ChosenStep, LaunchedStep, ModelRunner, Sampled
from lorafleet.workers.step.unread_plan import unread_inputs
from lorafleet.workers.structured.decoding import Fault, StructuredDecoding


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step on the host."""

    chunks: list[Chunk]
    plan: StepPlan | None  # None if there are no chunks.
    num_ended: int  # FairQueue.num_ended when it was planned.
    unread: UnreadInputs | None = None  # What the plan lacks.
    drafts: UnknownDrafts | None = None  # Drafts that the host does not know.


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step whose tokens the host has read."""

    chunks: list[Chunk]
    ends: list[int]  # Number of computed tokens of each chunk's sequence after the step.
    plain: list[int]  # The token of each of the first chunks, whose sequences want nothing else.
    sampled: list[Sampled]  # The result of each of the other chunks.
    late: Many[Sequence]  # Sequences that got no token, since their masks were late.
    shape: StepShape
    began_s: float  # Start of the step by time.perf_counter().
    made: MadeDrafts | None  # Drafts that were made after the step was planned.

    @property
    def num_planned_drafts(self) -> int:
        """Number of draft tokens for which the step had room."""
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def drafted_way(self) -> DraftedWay:
        """The way in which it got its drafts, if it has any."""
        others = zip(self.chunks[len(self.plain) :], self.sampled, strict=True)
        masked = [len(own.tokens) for chunk, own in others if chunk.sequence.grammar is not None]
        is_ahead = any(UNKNOWN in chunk.drafts for chunk in self.chunks)
        return DraftedWay(is_ahead, masked, 1.0 if self.made is None else self.made.found)

    def num_drafts(self, chunk: Chunk) -> int:
        """Returns the number of drafts of one of its chunks."""
        num_planned = len(chunk.drafts)
        return num_planned if self.made is None else self.made.counts.get(chunk.sequence, num_planned)


@dataclass(slots=True)
class _StepInFlight:
    """A step that has been launched and not collected."""

    launched: LaunchedStep
    ends: list[int]  # As in CollectedStep. Accepted drafts of the step before count once that one is collected.
    began_s: float
    masks_are_requested: bool
    chosen: ChosenStep | None  # None until choose(), if the choice waits for masks.

    def go_on_behind(self, chunks: Many[Chunk], sampled: Many[Sampled]) -> None:
        """Takes in what the step before has accepted: the last of its chunks, and the result of each."""
        accepted = {
            chunk.sequence: len(own.tokens) - 1 for chunk, own in zip(chunks, sampled, strict=True) if own.tokens
        }
        places = zip(self.launched.chunks, self.ends, strict=True)
        self.ends = [end + accepted.get(chunk.sequence, 0) for chunk, end in places]


class StepPipeline:
    """The steps in flight: at most one between two calls of Engine.step, and two in between.

    A step is launched only behind one whose tokens have been chosen, and that one is collected next.
    """

    def __init__(self, runner: ModelRunner, structured: StructuredDecoding, scheduler: Scheduler) -> None:
        self._runner = runner
        self._structured = structured
        self._scheduler = scheduler
        self._in_flight: _StepInFlight | None = None
        self._next: _StepInFlight | None = None  # launched behind the one in flight, whose place it takes in collect()
        self.launched_s = 0.0  # When the device got the last step, by time.perf_counter().

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight."""
        return self._in_flight is not None

    @property
    def has_drafts(self) -> bool:
        """Whether the step in flight verifies drafts."""
        return self._in_flight is not None and self._in_flight.launched.has_drafts

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of the step in flight."""
        return [] if self._in_flight is None else self._in_flight.launched.chunks

    @property
    def verification(self) -> DraftVerification | None:
        """The verification of the step in flight, if it has drafts and its tokens are chosen."""
        step = self._in_flight
        return None if step is None or step.chosen is None else step.chosen.verification

    def plan(self, chunks: list[Chunk], drafts: UnknownDrafts | None = None) -> PlannedStep:
        """Plans a step of these chunks. The tokens of the one in flight need not be chosen yet, unless it has drafts.

        Args:
            drafts: Those of the chunks that the host does not know.
        """
        if not chunks:
            return PlannedStep(chunks, None, self._scheduler.waiting.num_ended)
        before = None if self._in_flight is None else self._in_flight.launched
        plan = self._runner.plan(chunks, before)
        if self._in_flight is not None and self._in_flight.chosen is None:
            self._runner.prepare(plan)  # so that less is left to do once the masks have arrived
        unread = None if self.verification is None else unread_inputs(chunks, self.verification, drafts)
        if isinstance(drafts, AwaitedDrafts):
            self._runner.prepare(plan, unread)
        return PlannedStep(chunks, plan, self._scheduler.waiting.num_ended, unread, drafts)

    def choose(self) -> list[Fault]:
        """Queues the choice of the tokens in flight if it waits for masks. Returns the sequences that cannot go on."""
        step = self._in_flight
        if step is None or step.chosen is not None:
            return []
        assert self._next is None, "a launch overwrites the logits from which tokens are chosen"
        assert step.masks_are_requested
        masked = self._structured.finish()
        step.chosen = self._runner.choose(step.launched, masked.masks, masked.late)
        return masked.faults

    def launch(self, planned: PlannedStep, began_s: float) -> list[tuple[Sequence, Exception]]:
        """Launches a step, without sequences that have ended since it was planned or get no token from the step in
        flight. `began_s` is the step's start by time.perf_counter().

        Returns the sequences whose sampling could not be prepared. Others may share what the step computes for them.
        """
        assert self._next is None, "collect() comes between two launches"
        planned = self._without_ended(planned)
        runs_ahead = self._in_flight is not None
        if not runs_ahead:
            sampling = [chunk for chunk in planned.chunks if chunk.samples]
            self._start_masks(sampling, are_needed=any(chunk.sequence.grammar is not None for chunk in sampling))
        if planned.plan is None:
            return []
        unread, made = planned.unread, None
        if isinstance(planned.drafts, AwaitedDrafts):
            assert unread is not None and self._in_flight is not None and self._in_flight.chosen is not None
            made = planned.drafts.make(planned.chunks, self._in_flight.chosen.drawn())
            unread = unread.with_tokens(made.tokens)
        launched = self._runner.launch(planned.chunks, planned.plan, unread, made)
        self.launched_s = time.perf_counter()
        chosen = None if launched.needs_masks else self._runner.choose(launched)
        # Behind drafts in flight, the plan has lengths that sequences may not reach.
        num_decodes = planned.plan.num_decodes if planned.unread is None else 0
        self._scheduler.launched(planned.chunks, num_decodes)
        if launched.has_drafts:
            for chunk in planned.chunks:
                chunk.sequence.num_unverified += len(chunk.drafts)
        ends = planned.plan.attention.context_lens[:num_decodes]
        ends += [chunk.sequence.num_computed for chunk in planned.chunks[num_decodes:]]
        self._next = _StepInFlight(launched, ends, began_s, masks_are_requested=not runs_ahead, chosen=chosen)
        return launched.faults

    def collect(self) -> CollectedStep | None:
        """Waits for the step in flight and returns it, or None if there is none. The step launched behind it takes its
        place."""
        step, self._in_flight, self._next = self._in_flight, self._next, None
        if step is None:
            return None
        assert step.chosen is not None, "choose() comes before collect()"
        launched, late = step.launched, step.chosen.late
        plain, sampled = step.chosen.collect()
        if step.chosen.verification is not None and self._in_flight is not None:
            self._in_flight.go_on_behind(launched.chunks[len(plain) :], sampled)
        shape, made = launched.shape, launched.made
        return CollectedStep(launched.chunks, step.ends, plain, sampled, late, shape, step.began_s, made)

    def request_masks(self) -> None:
        """Requests the masks of the step in flight, unless they were requested before its launch.

        Call it when the tokens of all earlier steps are known. The masks are computed while the step runs.
        """
        step = self._in_flight
        if step is not None and not step.masks_are_requested:
            assert self._next is None
            self._start_masks(step.launched.sampling, are_needed=step.launched.needs_masks)
            step.masks_are_requested = True

    def _start_masks(self, sampling: Many[Chunk], *, are_needed: bool) -> None:
        """Requests the masks of a step's chunks that sample, or none if they are not needed."""
        if not are_needed:
            sampling = []
        drafts = {chunk.sequence: chunk.drafts for chunk in sampling if chunk.drafts}
        self._structured.start([chunk.sequence for chunk in sampling], drafts)

    def _without_ended(self, planned: PlannedStep) -> PlannedStep:
        """Returns the step without the sequences that cannot go on now, planned again if there are any."""
        before = self._in_flight
        assert before is None or before.chosen is not None, "choose() comes before the next launch"
        late = set(before.chosen.late) if before is not None and before.chosen is not None else set()
        if not late and self._scheduler.waiting.num_ended == planned.num_ended:
            return planned
        chunks = [c for c in planned.chunks if not c.sequence.ended and c.sequence not in late]
        return planned if len(chunks) == len(planned.chunks) else self.plan(chunks, planned.drafts)

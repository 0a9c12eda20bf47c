"""Decides which sequences get drafts in a step, and how many tokens of them, by what drafts were worth so far.

A step with drafts takes longer, since it computes more tokens. So tokens are drafted only if the step should give more
tokens per second than one without drafts. What is needed for that
is measured: how often drafts are accepted (acceptance.py), and how long steps take (step_pace.py). Now and then a step
has no drafts, or drafts that should not pay, to learn whether that has changed (draft_turns.py). Steps that compute
prompts have no drafts, since how long such steps take depends on much else.

Drafts follow known tokens. A drafter on the device knows them before the host does. So behind a step with drafts, it
drafts for the next one while the first is still in flight, and these steps overlap. For a drafter on the host, the next
step is planned meanwhile (ahead_drafts.py). The first drafts of a sequence wait until the host has read the tokens.

Where a grammar forces the next tokens, these are the drafts. They are always right, so they say nothing about others.
Masks are computed for drafts that the host knows. So behind a step in flight, a sequence with a grammar has forced
tokens as drafts, or none, while the others do not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import nullcontext

from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget
from lorafleet.workers.speculation.acceptance import Acceptances
from lorafleet.workers.speculation.ahead_drafts import AheadDrafts
from lorafleet.workers.speculation.ahead_pace import WAITED, DraftedWay
from lorafleet.workers.speculation.awaited_drafts import UnknownDrafts
from lorafleet.workers.speculation.draft_choice import DraftChoice
from lorafleet.workers.speculation.draft_turns import DraftTurns
from lorafleet.workers.speculation.drafter import Drafter, Wanted
from lorafleet.workers.speculation.host_times import HostTimes
from lorafleet.workers.speculation.step_pace import StepPace


class Speculation:
    """The drafts of one engine.

    Args:
        drafter: Proposes drafts. None if all drafts are tokens that grammars force.
        most_tokens: Largest number of draft tokens of one sequence.
        most_sampled: Largest number of tokens that one step may choose.
        most_drafts: Largest number of draft tokens in one step, or None if nothing else bounds it.
        is_certain: Whether the drafter nearly always proposes as many tokens as are wanted, and takes its time for
            that. Then it is asked only if so many pay, and once for a step.
        ahead: What makes drafts behind a step in flight. None if the drafter cannot.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        budget: StepBudget,
        most_tokens: int,
        most_sampled: int,
        pace: StepPace | None = None,
        *,
        most_drafts: int | None = None,
        is_certain: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        ahead: AheadDrafts | None = None,
    ) -> None:
        self.drafter = drafter
        self._budget = budget
        self._most_tokens = most_tokens
        self._pace = pace or StepPace()
        self._is_certain = is_certain
        self.times = HostTimes(clock)
        self._ahead = ahead
        self._acceptances = Acceptances()
        most = min(most_sampled, budget.limits.max_tokens)
        self._choice = DraftChoice(self._pace, self._acceptances, most_tokens, most, most_drafts)
        self._forced: dict[Sequence, list[int]] = {}  # Drafts that a grammar forces, of the last choose().
        self._have_forced: set[Sequence] = set()  # Sequences whose drafts in flight are forced.
        self._turns = DraftTurns()
        # Seconds that a drafter which takes its time took in steps without drafts, since the last one with drafts.
        self._unpaid_s = 0.0

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._acceptances.release(sequence)
        self._have_forced.discard(sequence)
        if self.drafter is not None:
            self.drafter.release(sequence)

    @property
    def unknown(self) -> UnknownDrafts | None:
        """The drafts of the last choose() that the host does not know."""
        return None if self._ahead is None else self._ahead.made

    def needs_tokens(
        self,
        in_flight: Many[Chunk],
        running: Many[Sequence],
        num_sequences: int,
        verification: DraftVerification | None = None,
    ) -> bool:
        """Returns whether the next step cannot be planned, or should not be, before the tokens in flight are known.

        A sequence whose drafts are in flight has an unknown length, which only a step with drafts can start from. If
        other drafts would pay, they follow a known token.

        Args:
            running: The sequences that might have drafts in the next step.
            num_sequences: As in choose().
            verification: That of the step in flight, if there is one.
        """
        if self._ahead is not None:
            self._ahead.forget()
        is_behind_drafts = any(chunk.drafts for chunk in in_flight)
        if is_behind_drafts:
            is_needed = verification is None or not self._can_draft_behind(verification, running, num_sequences)
        else:
            is_needed = self._would_draft(running, num_sequences)
        self.times.begin(is_settled=is_needed, is_behind_drafts=is_behind_drafts)
        return is_needed

    def _would_draft(self, running: Many[Sequence], num_sequences: int) -> bool:
        """Returns whether drafts behind the tokens in flight would pay. The arguments are those of needs_tokens()."""
        decodes = [s for s in running if s.num_uncomputed == 1 and s.tokens[-1] == UNKNOWN]
        if self._is_certain:
            return bool(self._wanted(decodes, decodes, num_sequences, num_unknown=0) or self._forced)
        return bool(self._propose(decodes, decodes, num_sequences, num_unknown=1))

    def launched(self, chunks: Many[Chunk], launched_s: float) -> None:
        """Takes in that a step of these chunks was launched at this time by the clock."""
        drafted = {chunk.sequence for chunk in chunks if chunk.drafts}
        self._have_forced = (self._have_forced - drafted) | (drafted & self._forced.keys())
        idle_s = self.times.launched(launched_s)
        if idle_s is not None and not drafted:
            self._pace.idled(len(chunks), idle_s)

    def choose(
        self, unfinished: Iterable[Sequence], num_sequences: int, *, is_behind: bool = False
    ) -> dict[Sequence, list[int]]:
        """Returns the drafts that the next step should verify, by sequence. Those in `unknown` are UNKNOWN.

        Args:
            unfinished: The running sequences in scheduling order.
            num_sequences: Largest number of sequences in the step.
            is_behind: Whether a step is in flight, for which needs_tokens() was asked.
        """
        if is_behind:
            return {} if self._ahead is None else self._ahead.draft(unfinished, self._forced)
        if self._ahead is not None:
            self._ahead.forget()
        decodes = [sequence for sequence in unfinished if sequence.num_uncomputed == 1]
        known = [sequence for sequence in decodes if sequence.num_generated and sequence.tokens[-1] != UNKNOWN]
        return self._propose(known, decodes, num_sequences, num_unknown=0)

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Takes in how many of a sequence's draft tokens were accepted."""
        if sequence in self._have_forced:
            self._have_forced.discard(sequence)
        else:
            self._acceptances.verified(sequence, num_drafted, num_accepted)

    def observe(
        self,
        shape: StepShape,
        num_drafts: int,
        seconds: float,
        way: DraftedWay = WAITED,
    ) -> float:
        """Takes in the duration of a step with this many draft tokens. Returns the seconds that it took without the
        drafter's part."""
        drafting_s = self.times.step_ended()
        if num_drafts and self._ahead is not None:
            drafting_s = self._ahead.drafting_s(drafting_s, is_ahead=way.is_ahead)
            if shape.kind == "decode":
                self._ahead.pace.observe(shape.num_tokens, seconds, self._budget.token_s, way)
        undrafted_s = max(0.0, seconds - drafting_s)
        if num_drafts:
            self._pace.waited(self._unpaid_s)
            self._unpaid_s = 0.0
        elif not self._turns.is_probe:  # A probe finds a drafter that has not worked for long.
            self._unpaid_s += drafting_s
        num_decodes, has_prompts = shape.num_tokens - num_drafts, shape.kind != "decode"
        is_timed = self._turns.ended(num_decodes, has_drafts=num_drafts > 0, has_prompts=has_prompts)
        self._pace.num_in_row = self._turns.num_in_row
        if is_timed:
            # A drafter may take its time and have nothing, as while a model catches up with a long prompt.
            paced_s = seconds if num_drafts else undrafted_s
            self._pace.observe(num_decodes, num_drafts, paced_s, self._budget.token_s)
        return undrafted_s

    def _can_draft_behind(self, verification: DraftVerification, running: Many[Sequence], num_sequences: int) -> bool:
        """Returns whether the drafts of the next step can be made behind those in flight, and should pay. The arguments
        are those of needs_tokens()."""
        if self._ahead is None:
            return False
        decodes = [sequence for sequence in running if sequence.num_remaining > 0]
        wanted = self._wanted(decodes, decodes, num_sequences, num_unknown=0, is_behind=True)
        num_masked = sum(sequence.grammar is not None for sequence in decodes)
        num_accepted = self._acceptances.expected(map(_drafted, wanted))
        num_others = len(decodes) - num_masked
        if not self._ahead.pace.is_ahead(self._budget.token_s, num_others, num_accepted, num_masked):
            return False
        behind = self._ahead.prepare(wanted, verification, self._most_tokens)
        if not behind or self._turns.is_probe:
            return bool(behind)
        forced = [(sequence, len(found)) for sequence, found in self._forced.items()]
        counts = [*forced, *map(_drafted, behind)]
        return self._choice.pay(len(decodes), counts, self._forced, self._budget.token_s)

    def _propose(
        self, drafting: Many[Sequence], decodes: Many[Sequence], num_sequences: int, num_unknown: int
    ) -> dict[Sequence, list[int]]:
        """Returns the drafts that pay, by sequence.

        Args:
            drafting: The sequences that may get drafts. The last num_unknown tokens of each are in flight.
            decodes: The step's decodes.
        """
        wanted = self._wanted(drafting, decodes, num_sequences, num_unknown)
        with self.times.drafting() if self._is_certain and wanted else nullcontext():
            proposed = zip(wanted, [] if self.drafter is None else self.drafter.propose(wanted), strict=True)
        drafts = {entry.sequence: found[num_unknown:] for entry, found in proposed if len(found) > num_unknown}
        if not self._is_certain:  # A certain drafter was asked for the best number of tokens.
            lengths = self._best_lengths(len(decodes), list(drafts), list(map(len, drafts.values())), num_sequences)
            drafts = {own: found[:count] for (own, found), count in zip(drafts.items(), lengths, strict=True) if count}
        return drafts | self._forced

    def _wanted(
        self,
        drafting: Many[Sequence],
        decodes: Many[Sequence],
        num_sequences: int,
        num_unknown: int,
        *,
        is_behind: bool = False,
    ) -> list[Wanted]:
        """Returns the sequences for which drafts should be worth their time, with as many tokens as each should have,
        or with as many as each may have if it is not certain that the drafter has any. The arguments are as above.

        Args:
            is_behind: Whether the host will not know the drafts when masks are computed.
        """
        self._forced = {}
        if self._turns.is_plain or not drafting:
            return []
        room = self._choice.room(num_sequences)
        sequences: list[Sequence] = []
        mosts: list[int] = []
        for sequence in drafting:
            most = min(self._most_tokens, sequence.num_remaining - 1, room)
            if most <= 0:
                continue
            if forced := _forced(sequence)[:most]:
                self._forced[sequence] = forced
                room -= len(forced)
            elif self.drafter is not None and not (is_behind and sequence.grammar is not None):
                sequences.append(sequence)
                mosts.append(most)
        lengths = self._best_lengths(len(decodes), sequences, mosts, num_sequences)
        if not (self._is_certain or is_behind):
            lengths = [most if count else 0 for most, count in zip(mosts, lengths, strict=True)]
        return _wanted_of(sequences, lengths, num_unknown)

    def _best_lengths(
        self, num_decodes: int, drafting: Many[Sequence], mosts: Many[int], num_sequences: int
    ) -> list[int]:
        """Returns the number of draft tokens of each sequence with which the step should give most tokens per second.
        Forgets the forced ones if the step should be faster without any.

        Args:
            mosts: Number of draft tokens that each sequence may have.
            num_sequences: As in choose().
        """
        if not drafting and not self._forced:
            return []
        num_forced = sum(map(len, self._forced.values()))
        room = self._choice.room(num_sequences) - num_forced
        if self._turns.is_probe:
            return self._choice.probed(num_decodes, drafting, mosts, room, num_forced)
        lengths = self._choice.lengths(num_decodes, drafting, mosts, room, num_forced, self._budget.token_s)
        if lengths is None:
            self._forced = {}
        return lengths or [0] * len(drafting)


def _wanted_of(sequences: Many[Sequence], lengths: Many[int], num_unknown: int) -> list[Wanted]:
    """Returns the sequences that should have any draft tokens. The last num_unknown tokens of each are in flight."""
    return [
        Wanted(sequence, len(sequence.tokens) - num_unknown, count + num_unknown)
        for sequence, count in zip(sequences, lengths, strict=True)
        if count
    ]


def _drafted(entry: Wanted) -> tuple[Sequence, int]:
    return entry.sequence, entry.most


def _forced(sequence: Sequence) -> list[int]:
    """Returns the tokens that the sequence's grammar forces behind its last one, which may be in flight. There are none
    while drafts are in flight, since it is not known how many are right."""
    if sequence.grammar is None or sequence.num_unverified:
        return []
    num_unknown = int(sequence.tokens[-1] == UNKNOWN)
    return sequence.grammar.forced.after(sequence.tokens, len(sequence.tokens) - num_unknown)[num_unknown:]

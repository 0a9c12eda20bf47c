"""Drafts for the next step while the step in flight verifies drafts, so that it can be planned meanwhile.

The host goes on as if all drafts in flight were accepted: with the lengths of sequences, their KV blocks, and the
tokens that an answer may still get. The device corrects that. A drafter on the device drafts behind those that were
accepted, and the host need not read them before it launches the next step. Others draft when the host has read them
(awaited_drafts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.awaited_drafts import UnknownDrafts
from lorafleet.workers.speculation.drafter import Drafter, Wanted


class AheadDrafter(Drafter, Protocol):
    """A drafter for steps that are planned behind a step in flight, whose tokens the host has not read. Its drafts are
    made on the device, or once the host has read these tokens."""

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        """Returns whether it can draft for a sequence behind the step in flight, which verifies drafts."""
        ...

    def may_catch_up(self, sequence: Sequence) -> bool:
        """Returns whether propose() may help a sequence for which is_current() is False. It does not if there is no
        memory for it."""
        ...

    def propose_behind(self, wanted: Many[Wanted], step: DraftVerification) -> UnknownDrafts:
        """Queues the drafts that follow the tokens with which the step in flight goes on, and waits for nothing.

        Args:
            wanted: is_current() for all of them. num_known is the number of tokens before those of the step.
        """
        ...


class AheadDrafts:
    """The drafts of one engine that the host does not know when it plans their step."""

    def __init__(self, drafter: AheadDrafter, pace: AheadPace | None = None) -> None:
        self.pace = pace or AheadPace()
        self.made: UnknownDrafts | None = None  # Those of the next step.
        self._usual_s = 0.0  # Seconds that the drafter took when it was last waited for.
        self._drafter = drafter
        self._wanted: list[Wanted] = []
        self._step: DraftVerification | None = None  # The step in flight behind which they are wanted.

    def prepare(self, wanted: Many[Wanted], step: DraftVerification, most_tokens: int) -> list[Wanted]:
        """Returns those of the wanted drafts that can be made behind the step in flight. There are none if it is better
        to wait for the tokens, since a sequence has to be caught up with.

        Args:
            most_tokens: Largest number of draft tokens of one sequence. It is not worth waiting for the end of an
                answer that has no more tokens left, nor for a sequence that the drafter cannot catch up with now.
        """
        self._wanted, self._step = [], step
        for entry in wanted:
            sequence = entry.sequence
            behind = entry._replace(num_known=len(sequence.tokens) - 1)
            if sequence.tokens[-1] == UNKNOWN and self._drafter.is_current(behind, step):
                self._wanted.append(behind)
            elif sequence.num_remaining > most_tokens and self._drafter.may_catch_up(sequence):
                self._wanted = []
                break
        return self._wanted

    def draft(self, unfinished: Iterable[Sequence], forced: Mapping[Sequence, list[int]]) -> dict[Sequence, list[int]]:
        """Queues the drafts that prepare() has returned. Returns as many unknown tokens for each of these sequences
        that are in the next step, and the forced ones of others. There are none if none were prepared."""
        kept = set(unfinished)
        wanted = [entry for entry in self._wanted if entry.sequence in kept]
        self.made = None
        if not wanted or self._step is None:
            return {}
        self.made = self._drafter.propose_behind(wanted, self._step)
        drafts = {sequence: tokens for sequence, tokens in forced.items() if sequence in kept}
        return drafts | {sequence: [UNKNOWN] * count for sequence, count in self.made.counts.items()}

    def drafting_s(self, waited_s: float, *, is_ahead: bool) -> float:
        """Returns the seconds that the drafts of a step took. The host waited for so many of them, which are usual for
        the steps behind."""
        if is_ahead:
            return self._usual_s
        self._usual_s = waited_s or self._usual_s  # Forced drafts take no time.
        return waited_s

    def forget(self) -> None:
        """Forgets what was prepared and drafted."""
        self._wanted, self._step, self.made = [], None, None

"""Drafts for the next step while the step in flight verifies drafts, so that the host need not read its tokens before.

The device knows how many drafts were accepted, and drafts behind them. The host knows less than that, so it goes on as
if all of them were: with the lengths of sequences, their KV blocks, and the tokens that an answer may still get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.drafter import DeviceDrafter, DeviceDrafts, Wanted


class AheadDrafts:
    """The drafts of one engine that the host does not know before they are verified."""

    def __init__(self, drafter: DeviceDrafter, pace: AheadPace | None = None) -> None:
        self.pace = pace or AheadPace()
        self.made: DeviceDrafts | None = None  # Those of the next step.
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

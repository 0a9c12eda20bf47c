"""Learns whether steps with drafts are faster if they are planned behind the step in flight, or if they wait for its
tokens.

Steps behind one in flight keep the GPU busy, but cost the host more. With small models, the GPU is done before the
host. A sequence with a grammar also has fewer drafts there, and a drafter may have fewer than there is room for. So
either way is timed again and again, and that with more tokens per second is used.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorafleet.workers.speculation.step_pace import PaceCurve

TRIAL_STEPS = 6  # Steps with drafts that go the slower way, to time it. The first one is between the two ways.
TRIAL_PERIOD = 256  # Steps with drafts from the end of one such trial to the next.
WEIGHT = 1 / 32  # Weight of one step in means of what steps have brought.


@dataclass(frozen=True, slots=True)
class DraftedWay:
    """The way in which a step got its drafts, and what they have brought."""

    is_ahead: bool = False  # Whether the step was planned behind one in flight.
    masked: Many[int] = ()  # Number of tokens that each sequence with a grammar got.
    found: float = 1.0  # MadeDrafts.found of the step. 1 if its drafts were there when it was planned.


WAITED = DraftedWay()  # The way of a step that waited for the tokens before, or has no drafts.


class AheadPace:
    """The times of one engine's steps with drafts."""

    def __init__(self) -> None:
        self._curves = {True: PaceCurve(), False: PaceCurve()}  # By whether drafts followed the step in flight.
        self._num_steps = 0
        self._timed = {True: 0, False: 0}  # Steps of either kind since the last trial of it.
        self._trial_due = 0  # Number of the step from which on the slower way is tried.
        self._last: bool | None = None  # Whether the drafts of the last step followed one in flight.
        self._tokens = 1  # Tokens of the last step.
        self._masked = {True: 1.0, False: 1.0}  # Mean number of tokens of a sequence with a grammar in either way.
        self._found = 1.0  # Mean of DraftedWay.found of steps behind one in flight.
        self._gain = 1.0  # Tokens of the next step that follows one in flight, as a share of those of one that waits.

    def observe(self, num_tokens: int, seconds: float, token_s: float, way: DraftedWay) -> None:
        """Takes in a step with drafts. token_s is as in StepPace."""
        is_ahead, masked = way.is_ahead, way.masked
        self._num_steps += 1
        self._tokens = num_tokens
        if masked:
            self._masked[is_ahead] += WEIGHT * (sum(masked) / len(masked) - self._masked[is_ahead])
        if is_ahead:
            self._found += WEIGHT * (way.found - self._found)
        if self._last == is_ahead:
            self._curves[is_ahead].observe(num_tokens, seconds, token_s, self._num_steps)
        self._last = is_ahead
        self._timed[is_ahead] += 1
        is_trial = self._num_steps >= self._trial_due and is_ahead != self._is_faster_ahead(token_s)
        if is_trial and self._timed[is_ahead] >= TRIAL_STEPS:
            self._timed[is_ahead] = 0
            self._trial_due = self._num_steps + TRIAL_PERIOD

    def is_ahead(self, token_s: float, num_others: float = 1.0, num_accepted: float = 0.0, num_masked: int = 0) -> bool:
        """Returns whether the next step should be planned behind the step in flight.

        Args:
            num_others: Number of sequences without a grammar.
            num_accepted: Number of their draft tokens that should be accepted, if there are as many as are wanted.
            num_masked: Number of sequences with a grammar.
        """
        ahead, waiting = (
            max(num_others + num_accepted * found + num_masked * self._masked[way], 1.0)
            for way, found in ((True, self._found), (False, 1.0))
        )
        self._gain = ahead / waiting
        for way in (True, False):
            if not self._curves[way].is_known:
                return way
        is_faster = self._is_faster_ahead(token_s)
        return not is_faster if self._num_steps >= self._trial_due else is_faster

    def _is_faster_ahead(self, token_s: float) -> bool:
        if not all(curve.is_known for curve in self._curves.values()):
            return True
        ahead_s, waiting_s = (self._curves[way].at(self._tokens, token_s, self._num_steps) for way in (True, False))
        return ahead_s <= waiting_s * self._gain

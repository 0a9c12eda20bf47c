"""Learns how long steps of decodes take, with drafts and without, so that drafts are verified where that is faster.

The time of a step jumps where a larger CUDA graph or another kernel is used. So either kind has a mean of the recent
steps of each of many ranges of tokens. For tokens of a range without any, the nearest one counts, and a line that all
recent steps fit. Where few steps were seen, the step budget's cost of a token (workers/schedule/step_cost.py) is its
slope.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate

WEIGHT = 1 / 32  # Of one step in the averages.
RANGE_WEIGHT = 1 / 8  # The same for one range of tokens.
RANGE = 1.25  # Factor between the ends of a range.
# Number of steps of either kind after which the mean of a range is no longer believed. It might be of steps that ran
# before their graph was captured, and say that such steps are never worth their time.
LASTING_STEPS = 1024
FIRM = 4.0  # Variance of the number of tokens from which on its slope is the steps' own rather than the given one.
# A step that takes more than this many times what it should counts as so long, since the host may have been busy. One
# that is shorter by this factor is believed at once: the steps before it waited for something, such as a compiler.
OUTLIER = 1.25
MANY_OUTLIERS = 3  # Number of long ones in a row that are believed.
LEAST_SHARE = 0.25  # Of its mean duration that a step takes at least, however few its tokens are.
MARGIN = 1.05  # Least gain for which tokens are drafted.


@dataclass(slots=True)
class PaceLine:
    """Seconds of a step over its tokens, by exponentially weighted least squares."""

    least_weight: float = WEIGHT
    num_steps: int = 0
    tokens: float = 0.0  # Mean number of tokens.
    seconds: float = 0.0  # Mean duration.
    variance: float = 0.0  # Of the tokens.
    covariance: float = 0.0  # Of tokens and seconds.
    num_long: int = 0  # Outliers in a row.

    def observe(self, num_tokens: int, seconds: float, token_s: float) -> None:
        usual = self.at(num_tokens, token_s)
        self.num_long = self.num_long + 1 if seconds > OUTLIER * usual else 0
        if OUTLIER * seconds < usual or self.num_long >= MANY_OUTLIERS:
            self.num_steps, self.num_long, self.variance, self.covariance = 0, 0, 0.0, 0.0
        elif self.num_steps:
            seconds = min(seconds, OUTLIER * usual)
        self.num_steps += 1
        weight = max(self.least_weight, 1 / self.num_steps)
        ahead, later = num_tokens - self.tokens, seconds - self.seconds
        self.tokens += weight * ahead
        self.seconds += weight * later
        self.variance = (1 - weight) * (self.variance + weight * ahead * ahead)
        self.covariance = (1 - weight) * (self.covariance + weight * ahead * later)

    def at(self, num_tokens: int, token_s: float) -> float:
        """Returns the seconds of a step. `token_s` is the slope of which nothing better is known."""
        seconds = self.seconds + self.slope(token_s) * (num_tokens - self.tokens)
        return max(seconds, LEAST_SHARE * self.seconds)

    def slope(self, token_s: float) -> float:
        """Returns the seconds of one token more, as above."""
        return max(0.0, (self.covariance + FIRM * token_s) / (self.variance + FIRM))


@dataclass(slots=True)
class PaceRange:
    """The steps of one range of tokens."""

    line: PaceLine = field(default_factory=lambda: PaceLine(RANGE_WEIGHT))
    last_step: int = 0  # Number of the last one.


class PaceCurve:
    """Seconds of one kind of steps over their tokens."""

    def __init__(self) -> None:
        self._line = PaceLine()
        self._ranges: dict[int, PaceRange] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._ranges)

    def observe(self, num_tokens: int, seconds: float, token_s: float, step: int) -> None:
        """Takes in the step of this number."""
        self._line.observe(num_tokens, seconds, token_s)
        found = self._ranges.setdefault(_range(num_tokens), PaceRange())
        found.line.observe(num_tokens, seconds, self._line.slope(token_s))
        found.last_step = step

    def at(self, num_tokens: int, token_s: float, step: int) -> float:
        """Returns the seconds of a step, as is known at the step of this number. As PaceLine.at otherwise."""
        return self.at_each([num_tokens], token_s, step)[0]

    def at_each(self, counts: Many[int], token_s: float, step: int) -> list[float]:
        """Returns the seconds of steps of these numbers of tokens, as at() does."""
        lasting = sorted(index for index, found in self._ranges.items() if step - found.last_step <= LASTING_STEPS)
        # The only step of a range may have been slow by chance, such as the first one of all, which loads kernels.
        firm = [index for index in lasting if self._ranges[index].line.num_steps > 1]
        known = firm or lasting or sorted(self._ranges)
        lines = [self._ranges[index].line for index in known]
        # A step of more tokens takes no less time than this one.
        bounds = [*accumulate(reversed([line.seconds for line in lines] if lasting else []), min, initial=math.inf)]
        slope = self._line.slope(token_s)
        found: list[float] = []
        for count in counts:
            wanted = _range(count)
            behind = bisect_right(known, wanted)  # Place of the first range of more tokens.
            nearest = min(known[max(0, behind - 1) : behind + 1], key=lambda index: abs(index - wanted))
            bound = bounds[len(lines) - behind] if lasting else math.inf
            found.append(min(bound, self._ranges[nearest].line.at(count, slope)))
        return found


def _range(num_tokens: int) -> int:
    return int(math.log(num_tokens) / math.log(RANGE))


class StepPace:
    """The curves of one engine."""

    def __init__(self) -> None:
        self.num_in_row = 1.0  # Usual number of steps that may have drafts before one that must not.
        self._plain = PaceCurve()
        self._drafted = PaceCurve()
        self._num_steps = 0
        self._waits_s = 0.0  # As in waited(), on average.
        self._idle = PaceCurve()  # As in idled(), over the decodes of the step.

    def observe(self, num_decodes: int, num_drafts: int, seconds: float, token_s: float) -> None:
        """Takes in a step of decodes alone, with this many draft tokens."""
        self._num_steps += 1
        curve = self._drafted if num_drafts else self._plain
        curve.observe(num_decodes + num_drafts, seconds, token_s, self._num_steps)

    def waited(self, seconds: float) -> None:
        """Takes in how long a drafter worked in steps that had no drafts, such as while a model catches up with a
        prompt, since the last step with drafts. Call it once for each step with drafts."""
        self._waits_s += WEIGHT * (seconds - self._waits_s)

    def idled(self, num_decodes: int, seconds: float) -> None:
        """Takes in how long the device waited for the host before a step without drafts, which follows one with drafts.
        How long it waits before a step with drafts is part of that step's time."""
        self._idle.observe(num_decodes, seconds, 0.0, self._num_steps)

    def best_count(self, num_decodes: int, counts: Many[int], accepted: Many[float], token_s: float) -> int:
        """Returns with how many draft tokens a step should give most tokens per second, or 0 if it should not be faster
        with any than without.

        Args:
            counts: The numbers of draft tokens to choose from.
            accepted: Number of them that should be accepted, for each of these.
        """
        seconds = self._drafted_s(num_decodes, counts, token_s)
        speeds = [(num_decodes + right) / max(taken_s, 1e-9) for right, taken_s in zip(accepted, seconds, strict=True)]
        if not speeds:
            return 0
        best = speeds.index(max(speeds))
        return counts[best] if self.is_faster(num_decodes, counts[best], accepted[best], token_s) else 0

    def is_faster(self, num_decodes: int, num_drafts: int, num_accepted: float, token_s: float) -> bool:
        """Returns whether a step with drafts should give more tokens per second than one without.

        Args:
            num_accepted: Number of draft tokens that should be accepted.
        """
        if not self._plain.is_known:
            return True
        plain_s = self._plain.at(num_decodes, token_s, self._num_steps)
        [drafted_s] = self._drafted_s(num_decodes, [num_drafts], token_s)
        return (num_decodes + num_accepted) * plain_s > MARGIN * num_decodes * drafted_s

    def _drafted_s(self, num_decodes: int, counts: Many[int], token_s: float) -> list[float]:
        """Returns the seconds of steps with these numbers of draft tokens."""
        if self._drafted.is_known:
            seconds = self._drafted.at_each([num_decodes + count for count in counts], token_s, self._num_steps)
        elif self._plain.is_known:
            plain_s = self._plain.at(num_decodes, token_s, self._num_steps)
            seconds = [plain_s + token_s * count for count in counts]
        else:
            seconds = [0.0] * len(counts)
        waits_s = self._waits_s
        if self._idle.is_known:
            waits_s += self._idle.at(num_decodes, 0.0, self._num_steps) / self.num_in_row
        return [waits_s + own for own in seconds]

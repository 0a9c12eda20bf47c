"""Predicts how long a step with prompts takes, from how long the steps before it took.

    seconds = per step + per token x tokens + per adapter token x tokens that use an adapter
              + per position x sum of the decodes' contexts, whose keys and values are read
              + per pair x (pairs of a prompt's token and a position that it attends to
                            + READ_TOKENS x sum of the prompts' contexts, which are read once for each chunk)

The five coefficients are those of this machine, model and mix of adapters. A Kalman filter fits them: each step
corrects them in proportion to their uncertainty. A step that took much longer than predicted moves them by a bounded
amount, since the host may have been busy. If several steps in a row are as far off, they are believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lorafleet.protocol.step_metrics import StepShape

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

# Seconds on one H200 with an 8B model in bf16 (benchmarks/NOTES.md). They need not be right, since steps correct them.
PRIOR = np.array([2e-3, 22e-6, 2e-6, 36e-9, 1.2e-9])
BOUNDS = (1e-3, 1e5)  # of each coefficient, as multiples of PRIOR
SPREAD = 10.0  # standard deviation of a coefficient of which nothing is known, as a multiple of it
DRIFT = 0.01  # growth of each coefficient's standard deviation in one step, likewise
NOISE = 0.05  # standard deviation of a step's duration, as a share of it
LEAST_NOISE_S = 3e-4
OUTLIER = 4.0  # number of standard deviations beyond which a step is an outlier
MANY_OUTLIERS = 4  # number of outliers in a row that are believed
READ_TOKENS = 32  # reading a context takes about as long as attending to it with this many tokens
FIRST_TOKENS = 512  # largest step with prompts before any was timed


@dataclass(frozen=True, slots=True)
class StepCost:
    """The coefficients in seconds."""

    step: float
    token: float
    adapter_token: float
    position: float
    pair: float

    def decodes(self, num_decodes: int, num_adapted: int, num_positions: int) -> float:
        """Returns the seconds of a step's decodes.

        Args:
            num_positions: Sum of their contexts.
        """
        return self.step + self.token * num_decodes + self.adapter_token * num_adapted + self.position * num_positions

    def chunk(self, num_tokens: int, context: int, *, adapted: bool) -> float:
        """Returns the seconds of a prompt's next tokens, which come behind `context` others."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) / 2
        return self._token(adapted) * num_tokens + self.pair * pairs + self.reading(context)

    def tokens_within(self, seconds: float, context: int, *, adapted: bool) -> int:
        """Returns the number of a prompt's next tokens that take so long."""
        # chunk(n) = a n^2 + b n + reading
        a, b = self.pair / 2, self._token(adapted) + self.pair * (context + 0.5)
        left_s = seconds - self.reading(context)
        return int(2 * left_s / (b + math.sqrt(b * b + 4 * a * left_s))) if left_s > 0 else 0

    def reading(self, context: int) -> float:
        """Returns the part of a chunk's seconds that does not depend on its number of tokens."""
        return self.pair * READ_TOKENS * context

    def _token(self, adapted: bool) -> float:
        return self.token + self.adapter_token if adapted else self.token


class StepCostFit:
    """Fits the coefficients to steps with prompts. Steps of decodes alone run other kernels, and nothing is decided
    for them."""

    def __init__(self) -> None:
        self.trusted_tokens = FIRST_TOKENS  # tokens of a step up to which the fit holds
        self._mean = np.ones(len(PRIOR))  # of the coefficients, as multiples of PRIOR
        self._covariance = self._widest()
        self._outliers = 0  # number in a row; negative if they were shorter than predicted

    @property
    def cost(self) -> StepCost:
        return StepCost(*(self._mean * PRIOR).tolist())

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in the duration of one step."""
        if shape.kind != "prefill":
            return
        self.trusted_tokens = max(self.trusted_tokens, 2 * shape.num_tokens)
        features = PRIOR * _features(shape)
        predicted = float(features @ self._mean)
        noise = max(LEAST_NOISE_S, NOISE * min(predicted, seconds)) ** 2
        self._drift()
        error = self._without_outlier(seconds - predicted, features, noise)
        gain = self._covariance @ features
        variance = float(features @ gain) + noise
        self._mean = np.clip(self._mean + gain * (error / variance), *BOUNDS)
        self._covariance = self._covariance - np.outer(gain, gain) / variance

    def _without_outlier(self, error: float, features: Vector, noise: float) -> float:
        """Returns the error, bounded if it is an outlier. If there were many in a row, all coefficients become
        uncertain."""
        bound = OUTLIER * math.sqrt(float(features @ self._covariance @ features) + noise)
        if abs(error) <= bound:
            self._outliers = 0
            return error
        sign = 1 if error > 0 else -1
        self._outliers = self._outliers + sign if self._outliers * sign > 0 else sign
        if abs(self._outliers) < MANY_OUTLIERS:
            return sign * bound
        self._outliers = 0
        self._covariance = self._widest()
        return error

    def _drift(self) -> None:
        """Makes each coefficient a little more uncertain, since they change with the mix of adapters."""
        covariance = self._covariance + np.diag((DRIFT * self._scale()) ** 2)
        shrink = np.minimum(1.0, SPREAD * self._scale() / np.sqrt(np.diag(covariance)))
        self._covariance = covariance * np.outer(shrink, shrink)

    def _scale(self) -> Vector:
        """Returns the size of each coefficient, as a multiple of PRIOR."""
        return np.clip(self._mean, 0.1 * float(self._mean.max()), None)

    def _widest(self) -> Matrix:
        """Returns the covariance of coefficients of which nothing but their size is known."""
        return np.diag((SPREAD * self._scale()) ** 2)


def _features(shape: StepShape) -> Vector:
    """Returns the number by which each coefficient is multiplied."""
    pairs = shape.prompt_pairs + READ_TOKENS * shape.prompt_positions
    return np.array([1, shape.num_tokens, shape.num_adapter_tokens, shape.decode_positions, pairs], np.float64)

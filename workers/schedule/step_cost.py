"""Predicts how long a step with prompts takes, from how long the steps before it took.

    seconds = per step + per token x tokens + per adapter token x tokens that use an adapter
              + per position x sum of the decodes' contexts, whose keys and values are read
              + per pair x pairs of a prompt's query and a key

Tokens and pairs are those that the device computes, in whole tiles (step_tiles.py). So the prediction has the steps in
time that the device has, and the coefficients are those of this machine, model and mix of adapters.

A Kalman filter fits them: each step corrects them in proportion to their uncertainty. A step that took much longer than
predicted moves them by a bounded amount, since the host may have been busy. If several steps in a row are as far off,
they are believed. The spread of the steps around their predictions is learned as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lorafleet.workers.schedule.step_tiles import StepTiles

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
FIRST_SPREAD = 0.1  # of a step's duration around its prediction, as a share of it, before any step was timed
MOST_SPREAD = 0.2  # a spread beyond this is the cost's error rather than chance
SPREAD_STEPS = 64  # number of steps over which the spread is averaged
FIRST_TOKENS = 512  # largest step with prompts before any was timed
SHARE_STEPS = 64  # number of steps over which the seconds of one token are averaged


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

    def chunk(self, num_tokens: int, num_pairs: int, *, num_adapted: int) -> float:
        """Returns the seconds of a prompt's next tokens.

        Args:
            num_tokens: Tokens that the linears compute for them.
            num_pairs: Pairs of a query and a key, as StepTiles.pairs.
        """
        return self.token * num_tokens + self.adapter_token * num_adapted + self.pair * num_pairs


class StepCostFit:
    """Fits the coefficients to steps with prompts. Steps of decodes alone run other kernels, and nothing is decided
    for them."""

    def __init__(self, tiles: StepTiles) -> None:
        self._tiles = tiles
        self.trusted_tokens = FIRST_TOKENS  # tokens of a step up to which the fit holds
        self._mean = np.ones(len(PRIOR))  # of the coefficients, as multiples of PRIOR
        self._covariance = self._widest()
        self._outliers = 0  # number in a row; negative if they were shorter than predicted
        self._variance = FIRST_SPREAD**2  # of a step's duration, as a share of its prediction
        self._sums = np.zeros(3)  # of recent steps' seconds, tokens, and tokens that use an adapter

    @property
    def cost(self) -> StepCost:
        return StepCost(*(self._mean * PRIOR).tolist())

    @property
    def spread(self) -> float:
        """Standard deviation of a step's duration around its prediction, as a share of the prediction."""
        return math.sqrt(self._variance)

    @property
    def token_s(self) -> float:
        """Seconds that one more token takes, with an adapter as often as recent tokens had one.

        Steps that are alike do not tell what a token takes from what a step takes, so the coefficients may be far off
        though their sum is right. Hence one token more takes at most the mean time of a token of recent steps.
        """
        seconds, num_tokens, num_adapted = self._sums.tolist()
        if not num_tokens:
            return self.cost.token
        return min(self.cost.token + self.cost.adapter_token * num_adapted / num_tokens, seconds / num_tokens)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in the duration of one step."""
        if shape.kind != "prefill":
            return
        step_sums = np.array([seconds, self._tiles.tokens(shape.num_tokens), shape.num_adapter_tokens])
        self._sums = (1 - 1 / SHARE_STEPS) * self._sums + step_sums
        self.trusted_tokens = max(self.trusted_tokens, 2 * shape.num_tokens)
        features = PRIOR * self._features(shape)
        predicted = float(features @ self._mean)
        noise = max(LEAST_NOISE_S, NOISE * min(predicted, seconds)) ** 2
        self._drift()
        error = self._without_outlier(seconds - predicted, features, noise)
        self._learn_spread(error / predicted)
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

    def _learn_spread(self, error: float) -> None:
        """Takes in the error of a prediction, as a share of it."""
        squared = min(error * error, MOST_SPREAD**2 * SPREAD_STEPS)
        self._variance = min(self._variance + (squared - self._variance) / SPREAD_STEPS, MOST_SPREAD**2)

    def _features(self, shape: StepShape) -> Vector:
        """Returns the number by which each coefficient is multiplied."""
        tokens = self._tiles.tokens(shape.num_tokens)
        pairs = sum(self._tiles.pairs(count, end - count) for count, end in shape.prompts)
        return np.array([1, tokens, shape.num_adapter_tokens, shape.decode_positions, pairs], np.float64)

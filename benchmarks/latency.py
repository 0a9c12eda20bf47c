"""What a client saw of its streams, and the figures made of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np


class Outcome(msgspec.Struct):
    """One request. Seconds since the run began; due_s is when it should have been sent.

    chunks_s: when each event with text arrived. num_tokens: as the server counts them.
    """

    due_s: float
    sent_s: float
    chunks_s: list[float]
    num_tokens: int
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        """From when it was due, so that a client that lags cannot flatter the server."""
        return self.chunks_s[0] - self.due_s


class Percentiles(NamedTuple):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Linear between neighbors; None of nothing."""
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if len(values) else None


class Summary(msgspec.Struct):
    """Seconds. Rates are over the time from the run's beginning to the last answer's end."""

    requests: int
    failed: int
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None  # gaps between neighboring chunks, of all requests together
    slo_attainment: dict[str, float]  # bound in seconds -> share of all requests; a failed one misses
    lag_s: Percentiles | None  # how much later than due requests were sent
    errors: list[str]  # the different ones


def summarize(outcomes: Sequence[Outcome], slos_s: Sequence[float]) -> Summary:
    done = [one for one in outcomes if one.error is None]
    elapsed_s = max((one.chunks_s[-1] for one in done), default=0.0)
    first = [one.first_token_s for one in done]
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(done),
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s if done else 0.0,
        tokens_per_s=sum(one.num_tokens for one in done) / elapsed_s if done else 0.0,
        first_token_s=Percentiles.of(first),
        inter_token_s=Percentiles.of([gap for one in done for gap in gaps_s(one)]),
        slo_attainment={f"{slo:g}": sum(s < slo for s in first) / max(1, len(outcomes)) for slo in slos_s},
        lag_s=Percentiles.of([one.sent_s - one.due_s for one in outcomes]),
        errors=sorted({one.error for one in outcomes if one.error is not None}),
    )


def gaps_s(outcome: Outcome, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
    """Between neighboring chunks of which the later one arrived in [begin_s, end_s)."""
    return [after - before for before, after in pairwise(outcome.chunks_s) if begin_s <= after < end_s]

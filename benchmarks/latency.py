"""Records the times that a client saw of its streams, and summarizes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np


class Outcome(msgspec.Struct):
    """One request; times are in seconds since the run began."""

    due_s: float  # The time at which it should have been sent.
    sent_s: float
    chunks_s: list[float]  # The time at which each event with text arrived.
    num_tokens: int  # The number of tokens that the server counted.
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        """Time to first token since the request was due, so that a slow client cannot flatter the server."""
        return self.chunks_s[0] - self.due_s


class Percentiles(NamedTuple):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Interpolates linearly between neighboring values; returns None if there are no values."""
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if len(values) else None


class Summary(msgspec.Struct):
    """The figures of one run, in seconds. Rates cover the time until the end of the last answer."""

    requests: int
    failed: int
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None  # Gaps between neighboring chunks, over all requests together.
    # Maps a bound in seconds to the share of all requests that meet it; a failed request does not.
    slo_attainment: dict[str, float]
    # The delay between the time at which requests were due and the time at which they were sent.
    lag_s: Percentiles | None
    errors: list[str]  # The distinct error messages.


def summarize(outcomes: Sequence[Outcome], slos_s: Sequence[float]) -> Summary:
    done = [outcome for outcome in outcomes if outcome.error is None]
    elapsed_s = max((outcome.chunks_s[-1] for outcome in done), default=0.0)
    first = [outcome.first_token_s for outcome in done]
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(done),
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s if done else 0.0,
        tokens_per_s=sum(outcome.num_tokens for outcome in done) / elapsed_s if done else 0.0,
        first_token_s=Percentiles.of(first),
        inter_token_s=Percentiles.of([gap for outcome in done for gap in gaps_s(outcome)]),
        slo_attainment={f"{slo:g}": sum(s < slo for s in first) / max(1, len(outcomes)) for slo in slos_s},
        lag_s=Percentiles.of([outcome.sent_s - outcome.due_s for outcome in outcomes]),
        errors=sorted({outcome.error for outcome in outcomes if outcome.error is not None}),
    )


def gaps_s(outcome: Outcome, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
    """Returns the gaps between neighboring chunks whose later chunk arrived in [begin_s, end_s)."""
    return [after - before for before, after in pairwise(outcome.chunks_s) if begin_s <= after < end_s]

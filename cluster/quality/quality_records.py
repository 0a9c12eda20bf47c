"""Defines what the catalogue's store has about the probes, and compares two of these records. book.py reads and
writes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.measures import Score, compare_places, equal_share, mean, perplexity


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """The result of one probe."""

    answer: list[int]  # The model's own greedy answer.
    places: list[TokenLogprobs]  # Its logprobs for each token of the baseline's answer.
    completion: Score | None = None  # Its score of the probe's completion, if there is one.


class Baseline(msgspec.Struct, frozen=True):
    """The results of one version on one set of probes."""

    digest: str  # The adapter's; "" for the base.
    at_s: float  # Seconds since 1970.
    observed: list[Observed]  # In the order of the probes.


class Measures(msgspec.Struct, frozen=True):
    """A comparison of a model with its baseline."""

    agreement: float  # Mean share of equal tokens up to the first difference.
    drift: float  # Mean absolute difference of logprobs along the baseline's answers, in nats.
    kl: float  # Mean KL from the baseline along the baseline's answers, in nats.
    perplexity: float | None  # Of the probes' completions; None if there are none.
    baseline_perplexity: float | None  # Of the same completions, when the baseline was made.


class Standing(msgspec.Struct, frozen=True, omit_defaults=True):
    """The standing of one set of probes. Times are in seconds since 1970."""

    model: str
    tried_s: float  # Start of the last run.
    error: str = ""  # Why the last run failed; "" if it did not.
    # All further fields are of the last run that did not fail.
    at_s: float | None = None
    digest: str = ""
    baseline_digest: str = ""
    baseline_at_s: float | None = None
    measures: Measures | None = None


def measure(baseline: Sequence[Observed], now: Sequence[Observed]) -> Measures:
    """Compares two results of the same probes. The places of `now` must be along the baseline's answers."""
    pairs = list(zip(baseline, now, strict=True))
    places = [place for before, after in pairs for place in compare_places(before.places, after.places)]
    return Measures(
        agreement=_mean([equal_share(before.answer, after.answer) for before, after in pairs]),
        drift=_mean([abs(place.logprob_change) for place in places]),
        kl=_mean([place.kl for place in places]),
        perplexity=_perplexity(now),
        baseline_perplexity=_perplexity(baseline),
    )


def _mean(values: Sequence[float]) -> float:
    found = mean(values)
    assert found is not None, "sets have probes, and answers tokens"
    return found


def _perplexity(observed: Sequence[Observed]) -> float | None:
    return perplexity([observation.completion for observation in observed if observation.completion is not None])

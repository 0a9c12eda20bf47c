"""What is kept of the probes in the catalogue's store, and what follows from two of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.measures import Score, compare_places, equal_share, mean, perplexity


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """Of one probe. answer: the model's own, greedy. places: what it says of each token of the baseline's answer.
    completion: of the probe's, where it has one."""

    answer: list[int]
    places: list[TokenLogprobs]
    completion: Score | None = None


class Baseline(msgspec.Struct, frozen=True):
    """One version on one set of probes, in their order. digest: the adapter's, "" of the base. at_s: since 1970."""

    digest: str
    at_s: float
    observed: list[Observed]


class Measures(msgspec.Struct, frozen=True):
    """Of a model beside its baseline. agreement: mean share of equal tokens up to the first difference. drift, kl:
    along the baseline's answers, the mean absolute difference of logprobs, and the mean KL from the baseline, both in
    nats. Perplexities are of the probes' completions; None where none has one."""

    agreement: float
    drift: float
    kl: float
    perplexity: float | None
    baseline_perplexity: float | None


class Standing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one set stands. tried_s: its last run began, which `error` says more of where it failed; the rest is of the
    last one that did not. Times are since 1970."""

    model: str
    tried_s: float
    error: str = ""
    at_s: float | None = None
    digest: str = ""
    baseline_digest: str = ""
    baseline_at_s: float | None = None
    measures: Measures | None = None


def measure(baseline: Sequence[Observed], now: Sequence[Observed]) -> Measures:
    """Of the same probes; now.places are along the baseline's answers."""
    pairs = list(zip(baseline, now, strict=True))
    places = [place for then, one in pairs for place in compare_places(then.places, one.places)]
    return Measures(
        agreement=_mean([equal_share(then.answer, one.answer) for then, one in pairs]),
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
    return perplexity([one.completion for one in observed if one.completion is not None])

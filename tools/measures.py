"""Computes the numbers of a comparison from tokens and logprobs alone. compare.py and cluster/quality/ get these from
the models."""

# K best tokens kept at a place

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lorafleet.protocol.messages import TokenLogprobs

LEAST = 1e-12  # Replaces a pooled probability that rounding has made zero or negative.


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """The difference between two models at one token of the baseline's answer."""

    same_choice: bool  # Whether both models consider the same token the most likely one.
    kl: float  # KL divergence of the other model from the baseline, in nats.
    logprob_change: float  # Logprob of the token in the other model minus that in the baseline, in nats.


@dataclass(frozen=True, slots=True)
class Score:
    """The logprob of a given text."""

    logprob: float  # Sum over the tokens, in nats.
    num_tokens: int  # Tokens that have a logprob.


def equal_share(answer: Sequence[int], other: Sequence[int]) -> float:
    """Returns the number of equal tokens before the first difference, divided by the length of the longer answer."""
    longest = max(len(answer), len(other))
    if longest == 0:
        return 1.0
    pairs = enumerate(zip(answer, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(answer), len(other))) / longest


def compare_places(baseline: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> list[TokenPlace]:
    """Compares the logprobs of two models along the same tokens."""
    return [
        TokenPlace(ours.top_ids[0] == theirs.top_ids[0], pooled_kl(ours, theirs), theirs.logprob - ours.logprob)
        for ours, theirs in zip(baseline, other, strict=True)
    ]


def pooled_kl(baseline: TokenLogprobs, other: TokenLogprobs) -> float:
    """Returns KL(baseline || other), where all tokens that are not among the K best of both models count as one
    token.

    The result is never larger than the KL of the whole distributions. It is hardly smaller if K tokens have nearly
    all of the probability.
    """
    p_log, q_log = _known(baseline), _known(other)
    common = p_log.keys() & q_log.keys()
    kl = sum(math.exp(p_log[i]) * (p_log[i] - q_log[i]) for i in common)
    p_rest, q_rest = (max(1 - sum(math.exp(known[i]) for i in common), LEAST) for known in (p_log, q_log))
    return max(kl + p_rest * math.log(p_rest / q_rest), 0.0)


def score(places: Sequence[TokenLogprobs | None]) -> Score:
    """Sums the logprobs of the tokens that have one. The first token of a sequence has none."""
    found = [place.logprob for place in places if place is not None]
    return Score(sum(found), len(found))


def perplexity(scores: Sequence[Score]) -> float | None:
    """Returns exp of the mean negative logprob of all tokens together, or None if there are no tokens."""
    num_tokens = sum(score.num_tokens for score in scores)
    return math.exp(-sum(score.logprob for score in scores) / num_tokens) if num_tokens else None


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _known(place: TokenLogprobs) -> dict[int, float]:
    return {**dict(zip(place.top_ids, place.top_logprobs, strict=True)), place.token_id: place.logprob}

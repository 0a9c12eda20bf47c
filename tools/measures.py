"""The numbers of a comparison, from tokens and logprobs alone."""

# K best tokens kept at a place

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lorafleet.protocol.messages import TokenLogprobs

LEAST = 1e-12  # of a pooled rest that rounding has made zero or less


@dataclass(frozen=True, slots=True)
class Place:
    """What two models say of one token of the baseline's answer. kl: of the other from the baseline, in nats."""

    same_choice: bool
    kl: float
    logprob_change: float


@dataclass(frozen=True, slots=True)
class Score:
    """Of a text that was given."""

    logprob: float
    num_tokens: int


def equal_share(one: Sequence[int], other: Sequence[int]) -> float:
    """The equal tokens up to the first difference, of the longer answer's."""
    longest = max(len(one), len(other))
    if longest == 0:
        return 1.0
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other))) / longest


def compare_places(baseline: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> list[Place]:
    """Along the same tokens."""
    return [
        Place(ours.top_ids[0] == theirs.top_ids[0], pooled_kl(ours, theirs), theirs.logprob - ours.logprob)
        for ours, theirs in zip(baseline, other, strict=True)
    ]


def pooled_kl(baseline: TokenLogprobs, other: TokenLogprobs) -> float:
    """KL(baseline || other) with all tokens that are not among the K best of both taken as one. So it never says more
    than the KL of the whole distributions does, and hardly less where K tokens have nearly all probability."""
    p_log, q_log = _known(baseline), _known(other)
    common = p_log.keys() & q_log.keys()
    kl = sum(math.exp(p_log[i]) * (p_log[i] - q_log[i]) for i in common)
    p_rest, q_rest = (max(1 - sum(math.exp(known[i]) for i in common), LEAST) for known in (p_log, q_log))
    return max(kl + p_rest * math.log(p_rest / q_rest), 0.0)


def score(places: Sequence[TokenLogprobs | None]) -> Score:
    """Of the tokens that have a logprob: a first token has none."""
    found = [place.logprob for place in places if place is not None]
    return Score(sum(found), len(found))


def perplexity(scores: Sequence[Score]) -> float | None:
    """exp of the mean negative logprob of all tokens together; None without any."""
    num_tokens = sum(one.num_tokens for one in scores)
    return math.exp(-sum(one.logprob for one in scores) / num_tokens) if num_tokens else None


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _known(place: TokenLogprobs) -> dict[int, float]:
    return {**dict(zip(place.top_ids, place.top_logprobs, strict=True)), place.token_id: place.logprob}

"""Describes how a router chooses the experts of a token and weights them. The kernels and their twins read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Equal groups of neighboring experts. A token's experts are chosen from its best groups only."""

    count: int
    per_token: int  # Groups from which a token's experts are chosen.
    ranked_by: Literal["top_two", "max"]  # A group's value: the sum of its two best scores, or its best score.


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The choice of a token's experts from the router's logits."""

    per_token: int  # Experts chosen for a token.
    sums_to_one: bool  # The chosen scores are divided by their sum.
    scores: Scores = (
        "softmax"  # Computed from all experts' logits. With sums_to_one, softmax equals that of the chosen.
    )
    groups: ExpertGroups | None = None  # None: any expert can be chosen.
    scaling: float = 1.0  # Multiplies the weights at the end.
    # sparsemixer: a chosen expert's weight is its softmax among the experts that were not chosen before it and are near
    # it. An expert with logit x is near the chosen one's m if (m - x) / max(abs(x), m) is at most this number.
    # Source: GRIN, arXiv 2409.12136.
    nearness: float = 0.0

    def __post_init__(self) -> None:
        assert self.scores != "sparsemixer" or (self.groups is None and not self.sums_to_one)

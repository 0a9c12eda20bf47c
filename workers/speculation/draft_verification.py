"""Compares draft tokens with those that the model draws in their places.

The draw of each place is a function of the request's seed and the position alone. So up to the first draft that is
wrong, the drawn tokens are those of steps without drafts, whether they are the likeliest or sampled. No rejection
sampling is needed, and no answer depends on what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Returns how many of the first drafts equal the tokens that were drawn in their places. The token drawn behind
    these counts as well."""
    for i, draft in enumerate(drafts):
        if drawn[i] != draft:
            return i
    return len(drafts)

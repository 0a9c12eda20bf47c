"""Holds the tokens that a grammar forces next: keys of JSON, brackets, the rest of a word that has been begun.

A step may verify them as drafts that cannot be wrong, since the mask of each place allows no other token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many


class ForcedTokens:
    """The forced tokens of one sequence, as of the last masks. Masks are requested for drafts that may turn out wrong,
    so there is a text for each number of drafts after which tokens are forced."""

    def __init__(self) -> None:
        self._first = 0
        self._texts: list[tuple[int, list[int]]] = []  # Number of drafts, and these with what is forced behind them.

    def replace(self, first: int, drafts: Many[int], forced: Many[tuple[int, Many[int]]]) -> None:
        """Takes what is forced after the first so many drafts, as in FollowedDrafts. The drafts follow the sequence's
        first `first` tokens."""
        self._first = first
        self._texts = [(count, [*drafts[:count], *tokens]) for count, tokens in forced]

    def after(self, tokens: Many[int], num_known: int) -> list[int]:
        """Returns the tokens that are forced behind the first num_known tokens of the sequence. There are none if
        nothing is forced, or if it is not known yet."""
        known = list(tokens[self._first : num_known])
        for count, text in reversed(self._texts):
            if count <= len(known) < len(text) and text[: len(known)] == known:
                return text[len(known) :]
        return []

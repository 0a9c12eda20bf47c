"""Finds where the last tokens of a sequence stood in a text: its own, or another one.

It is the match finder of LZ77 compressors: a table has the last place of each hash of min_length tokens, and each place
has the place before it with the same hash. A place costs four bytes there and four in the table, a token is added once,
and a search looks at a bounded number of places. Hashes may collide, so the tokens themselves are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

WINDOW = 1 << 15  # Most recent tokens among which matches are found.
MOST_PLACES = 16  # Places that one search compares, the most recent first.
NOWHERE = -1

_FACTOR = 0x9E3779B1  # An odd number whose multiples are spread over 32 bits.
_MASK = (1 << 32) - 1


class Match(NamedTuple):
    place: int  # Number of the text's tokens up to the end of those that match.
    length: int  # Number of tokens that match.


class NgramIndex:
    """The index of one growing text, which the caller holds and gives to each call.

    Args:
        min_length: Fewest tokens that must match.
        max_length: Most tokens that are compared.
        capacity: Length that the text may reach. It bounds the memory, as WINDOW does.
    """

    def __init__(self, min_length: int, max_length: int, capacity: int) -> None:
        self._min_length = min_length
        self._max_length = max_length
        bits = (min(capacity, WINDOW) - 1).bit_length()
        self._shift = 32 - bits
        self._size = 1 << bits
        self._last = array("i", [NOWHERE]) * self._size  # By hash: the newest place, which is the end of its tokens.
        self._before = array("i", [NOWHERE]) * self._size  # By place, modulo the size: the place before it.
        self.num_indexed = 0  # Tokens of the text that have been added.

    def extend(self, text: Sequence[int], end: int) -> None:
        """Adds the tokens of the text up to `end`."""
        last, before, mask = self._last, self._before, self._size - 1
        for place in range(max(self.num_indexed, self._min_length - 1) + 1, end + 1):
            key = self._hash(text, place)
            before[place & mask] = last[key]
            last[key] = place
        self.num_indexed = max(self.num_indexed, end)

    def find(self, text: Sequence[int], tokens: Sequence[int], end: int) -> Match | None:
        """Returns the longest match of the last tokens before `end`, or None. Of equally long ones it is the most
        recent.

        The text may be `tokens` itself. What ends at the text's end is no match, since nothing follows it.
        """
        if end < self._min_length:
            return None
        place = self._last[self._hash(tokens, end)]
        oldest = max(self._min_length, self.num_indexed - self._size + 1)
        found = None
        for _ in range(MOST_PLACES):
            if place < oldest:
                break
            length = self._matching(text, place, tokens, end) if place < self.num_indexed else 0
            if length >= self._min_length and (found is None or length > found.length):
                found = Match(place, length)
                if length == self._max_length:
                    break
            place = self._before[place & (self._size - 1)]
        return found

    def _matching(self, text: Sequence[int], place: int, tokens: Sequence[int], end: int) -> int:
        """Returns how many tokens of the text before `place` equal those before `end`, up to max_length."""
        most = min(self._max_length, place, end)
        for length in range(most):
            if text[place - 1 - length] != tokens[end - 1 - length]:
                return length
        return most

    def _hash(self, tokens: Sequence[int], end: int) -> int:
        """Returns the hash of the min_length tokens before `end`, below the table's size."""
        key = 0
        for i in range(end - self._min_length, end):
            key = ((key ^ tokens[i]) * _FACTOR) & _MASK
        return key >> self._shift

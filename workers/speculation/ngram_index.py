"""Finds where the last tokens of a sequence stood in a text: its own, or another one.

It is the match finder of LZ77 compressors: a table has the last place of each hash of min_length tokens, and each place
has the place before it with the same hash. A place costs four bytes there and four in the table, a token is added once,
and a search looks at a bounded number of places. Hashes may collide, so the tokens themselves are compared. A step adds
and seeks a few tokens of each sequence, so the loops are written for speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW = 1 << 15  # Most recent tokens among which matches are found.
MOST_PLACES = 16  # Places that one search compares, the most recent first.
NOWHERE = -1


class NgramIndex:
    """The index of one growing text, which the caller holds and gives to each call.

    Args:
        min_length: Fewest tokens that must match.
        max_length: Most tokens that are compared.
        capacity: Length that the text may reach. It bounds the memory, as WINDOW does.
    """

    def __init__(self, min_length: int, max_length: int, capacity: int) -> None:
        self._min_length = min_length
        self.max_length = max_length
        size = 1 << (min(capacity, WINDOW) - 1).bit_length()
        self._mask = size - 1
        # By hash, modulo the size: the newest place, which is the end of its tokens.
        self._last = array("i", [NOWHERE]) * size
        self._before = array("i", [NOWHERE]) * size  # By place, modulo the size: the place before it.
        self.num_indexed = 0  # Tokens of the text that have been added.
        self.last_hash = 0  # Hash of the last min_length of them. It has no meaning while they are fewer.

    def extend(self, text: Sequence[int], end: int) -> int:
        """Adds the tokens of the text up to `end`. Returns how many these were."""
        num_added = max(0, end - self.num_indexed)
        begin = max(self.num_indexed, self._min_length - 1)
        self.num_indexed += num_added
        if end <= begin:
            return num_added
        last, before, mask, place, key = self._last, self._before, self._mask, begin, 0
        # The min_length tokens before each place. A list is made sooner than a generator, which matters for one token.
        windows = zip(*[text[begin - i : end - i] for i in range(self._min_length)], strict=False)
        for key in map(hash, windows):
            place += 1
            entry = key & mask
            before[place & mask] = last[entry]
            last[entry] = place
        self.last_hash = key
        return num_added

    def find(self, text: Sequence[int], tokens: Sequence[int], end: int, last_hash: int) -> tuple[int, int]:
        """Returns the longest match of the last tokens before `end`: the number of the text's tokens up to its end, and
        the number of its own tokens, which is 0 if there is none. Of equally long ones it is the most recent.

        The text may be `tokens` itself. What ends at the text's end is no match, since nothing follows it.

        Args:
            last_hash: `last_hash` of the index to which these tokens were added up to `end`.
        """
        before, mask, num_indexed = self._before, self._mask, self.num_indexed
        oldest = max(self._min_length, num_indexed - mask)
        most = min(self.max_length, end)
        place = self._last[last_hash & mask] if end >= self._min_length else NOWHERE
        found, longest = NOWHERE, self._min_length - 1
        whole = tokens[end - most : end]
        for _ in range(MOST_PLACES):
            if place < oldest:
                break
            if place < num_indexed:
                # Lists are compared at once, since they are often equal. An array is not equal to any list.
                if place >= most and text[place - most : place] == whole:
                    return place, most
                length, limit = 0, min(most, place)
                while length < limit and text[place - 1 - length] == tokens[end - 1 - length]:
                    length += 1
                if length > longest:
                    found, longest = place, length
                    if length == most:
                        break
            place = before[place & mask]
        return (NOWHERE, 0) if found == NOWHERE else (found, longest)

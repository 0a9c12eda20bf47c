"""The places where the last tokens of a text stood before."""

from __future__ import annotations

import random
from array import array
from typing import Any

from lorafleet.workers.speculation import ngram_index
from lorafleet.workers.speculation.ngram_index import MOST_PLACES, NOWHERE, NgramIndex


def longest_match(tokens: list[int], end: int, shortest: int, longest: int) -> int | None:
    """Returns what find() does, from a look at every place."""
    for length in range(min(longest, end), shortest - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length : end]:
                return place
    return None


NONE = NOWHERE, 0


def find(index: NgramIndex, text: list[int], tokens: list[int], shortest: int) -> tuple[int, int]:
    """Finds the last of the tokens in a text that is indexed."""
    own = NgramIndex(shortest, shortest, 1000)
    own.extend(tokens, len(tokens))
    return index.find(text, tokens, len(tokens), own.last_hash)


def test_the_longest_match_is_found_and_the_most_recent_of_equal_ones() -> None:
    text = [1, 2, 3, 9, 7, 2, 3, 9, 5, 1, 2, 3, 6, 2, 3]
    index = NgramIndex(2, 3, 64)
    index.extend(text, len(text))
    assert find(index, text, text, 2) == (12, 2), "1 2 3 and 9 2 3 are before it, and 6 2 3 is not"
    assert find(index, text, [*text[:14], 9], 2) == NONE
    text = [7, 2, 3, 4, 8, 2, 3, 5, 7, 2, 3]
    index = NgramIndex(2, 3, 64)
    index.extend(text, len(text))
    assert find(index, text, text, 2) == (3, 3), "three tokens match there, and two at the more recent place"


def test_it_finds_what_a_look_at_every_place_finds_while_the_text_grows() -> None:
    rng = random.Random(2)
    for shortest, longest in ((1, 3), (2, 4), (3, 3)):
        text = [rng.randrange(12) for _ in range(400)]
        index, num_equal, num_found = NgramIndex(shortest, longest, len(text)), 0, 0
        for end in range(1, len(text)):
            index.extend(text, end)
            place, length = index.find(text, text, end, index.last_hash)
            assert index.find(array("i", text), text, end, index.last_hash) == (place, length)
            best = longest_match(text, end, shortest, longest)
            if not length:
                assert best is None
                continue
            assert text[place - shortest : place] == text[end - shortest : end]
            assert place < end
            num_found += 1
            num_equal += place == best
        assert num_found > 10
        assert num_equal >= 0.9 * num_found, "a search looks at the most recent places only"


def test_hashes_that_collide_are_no_matches(monkeypatch) -> None:
    monkeypatch.setattr(ngram_index, "hash", lambda _: 0, raising=False)
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    index = NgramIndex(2, 4, 16)
    index.extend(text, 8)
    assert find(index, text, text, 2) == (2, 2)
    assert find(index, text, [*text[:7], 9], 2) == NONE


def test_a_search_is_bounded_and_so_is_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(ngram_index, "WINDOW", 64)
    text = [1, 2, 9] + [1, 3] * 400
    index = NgramIndex(1, 2, 10_000)
    assert len(index._last) == len(index._before) == 64
    for end in range(1, len(text) + 1):
        index.extend(text, end)
        found = index.find(text, text, end, index.last_hash)
        assert found == NONE or found[0] > end - 64, "older tokens are forgotten"
    compared = []

    class Watched(list[int]):
        def __getitem__(self, place: Any) -> Any:
            compared.append(place)
            return super().__getitem__(slice(0, 1)) if isinstance(place, slice) else 7

    assert index.find(Watched(text), text, len(text), index.last_hash) == NONE
    assert 0 < len(compared) <= 2 * MOST_PLACES, "all tokens of a place at once, and then the last one"

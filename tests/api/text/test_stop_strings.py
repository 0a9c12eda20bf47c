from __future__ import annotations

import random
import tracemalloc

import pytest

from lorafleet.api.text.stop_strings import StopStrings, _Matcher
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS
from lorafleet.protocol.sampling_params import SamplingParams


def test_stop_matching_equals_a_scan_character_by_character() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(10))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        want = text
        for end in range(len(text) + 1):
            found = [s for s in stops if text[:end].endswith(s)]
            if found:
                want = text[: end - max(map(len, found))]
                break
        matcher, got = StopStrings(stops, include=False), ""
        for char in text:
            piece, stop = matcher.push(char)
            got += piece
            if stop is not None:
                break
        assert got + matcher.flush() == want


def test_what_is_held_is_the_longest_beginning_of_a_stop_string() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(3)]
        text = "".join(rng.choice("ab") for _ in range(12))
        matcher = StopStrings(stops, include=False)
        for start in range(0, len(text), 3):
            matcher.push(text[start : start + 3], may_stop=False)
            seen = text[: start + 3]
            beginnings = {stop[:k] for stop in stops for k in range(len(stop))}
            assert matcher.held == max((b for b in beginnings if seen.endswith(b)), key=len)


def test_long_stop_strings_take_memory_in_proportion_to_their_length() -> None:
    stops = [chr(ord("a") + i) * 20_000 for i in range(MAX_STOP_STRINGS)]
    tracemalloc.start()
    matcher = StopStrings(stops, include=False)
    matcher.push("a" * 19_999)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20  # the prefixes of all would be 3 GB


def test_an_answer_that_always_nearly_stops_takes_constant_time_a_character(monkeypatch) -> None:
    looks = 0
    advance = _Matcher._advance

    def counted(self: _Matcher, character: str) -> None:
        nonlocal looks
        before = self.num_matched
        advance(self, character)
        looks += 1 + max(0, before - self.num_matched)

    monkeypatch.setattr(_Matcher, "_advance", counted)
    matcher = StopStrings(["a" * 999 + "b"], include=False)
    for _ in range(5000):
        matcher.push("a")
    assert matcher.held == "a" * 999
    assert looks <= 2 * 5000


@pytest.mark.parametrize(
    ("stop", "match"),
    [
        (["x"] * (MAX_STOP_STRINGS + 1), f"17 entries; at most {MAX_STOP_STRINGS}"),
        ("x" * (MAX_STOP_CHARS + 1), f"1025 characters; at most {MAX_STOP_CHARS}"),
        (["ok", "x" * 20_000], "20000 characters"),
        ([""], "empty string"),
    ],
)
def test_stop_strings_are_bounded_in_number_and_length(stop: str | list[str], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"

"""Random texts of each format, with calls, halves of calls, stray markers and words between them.

However such a text is cut into chunks, the result is the same, a stream adds up to what the whole answer has, and no
word is lost.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest

from lorafleet.api.tool_calls import harmony
from lorafleet.api.tool_calls.forced import NamedCallParser
from lorafleet.api.tool_calls.known import FORMATS
from lorafleet.api.tool_calls.parser import CallArguments, Calls, CallStart, Event, Reasoning, Text, ToolCallParser
from lorafleet.api.tool_calls.section_formats import SECTIONS
from lorafleet.api.tool_calls.thinking import TAGS, ThinkingParser
from tests.api.tool_calls.call_texts import CALLS, JSON_FORMATS, TEXT_BEGUN, TEXTS, begun_by, calls_of

NUM_TEXTS = 8  # For each format and seed.
STRAY = ("```\n", '"', "{", "}", "[", "]", "\\u00", "\\", "'", "\n", " ", "é🎉", ", ", ";", "; <", "<function=f>")
WORD = re.compile(r"w\d+w")

Answer = tuple[str, str, list[tuple[str, str]]]  # The content, the reasoning, and the calls.


def markers(name: str) -> list[str]:
    found = {FORMATS[name].marker}
    if name == "harmony":
        found |= set(harmony.MARKERS)
    if name in SECTIONS:
        found |= {SECTIONS[name][0].start, SECTIONS[name][0].end}
    for text in (text for known, text, *_ in CALLS if known == name):
        found |= set(re.findall(r"<[^<>\s]{1,30}>|\[[A-Z_]+\]", text))
    return sorted(found - {""})


def random_text(rng: random.Random, name: str) -> str:
    valid = [text for known, text, *_ in CALLS if known == name]
    invalid = [text for known, text in TEXTS if known == name]
    pieces: list[str] = []
    for i in range(rng.randint(1, 6)):
        whole, marker = rng.choice(valid), rng.choice(markers(name))
        cut = rng.randrange(len(whole))
        choices = [whole, whole, whole[:cut], whole[cut:], marker, marker[: rng.randrange(len(marker))]]
        pieces.append(rng.choice([*choices, *invalid[:2], f" w{i}w ", f" w{i}w ", rng.choice(STRAY)]))
    return "".join(pieces)


def in_chunks(rng: random.Random, text: str) -> list[str]:
    most, chunks = rng.choice((2, 3, 8, 40)), list[str]()
    while text:
        length = rng.randint(1, most)
        chunks.append(text[:length])
        text = text[length:]
    return chunks


def read(parser: ToolCallParser, chunks: list[str]) -> Answer:
    events: list[Event] = [event for chunk in chunks for event in parser.push(chunk)]
    content, reasoning, calls = "", "", list[list[str]]()
    for event in [*events, *parser.finish()]:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def is_object(call: tuple[str, str]) -> bool:
    try:
        return isinstance(json.loads(call[1]), dict)
    except ValueError:
        return False


def check(rng: random.Random, text: str, make: Callable[[bool], ToolCallParser], *, has_headers: bool) -> None:
    streamed, whole = read(make(True), [text]), read(make(False), [text])
    for chunks in (list(text), in_chunks(rng, text), in_chunks(rng, text)):
        assert read(make(True), chunks) == streamed, chunks
        assert read(make(False), chunks) == whole, chunks
    assert all(map(is_object, whole[2])), text
    # Else a call that is not complete has begun in the stream, and the rest of its text is its arguments.
    if len(streamed[2]) == len(whole[2]) and all(map(is_object, streamed[2])):
        assert streamed == whole, text
    if not has_headers:  # A header has no words for the client.
        for content, reasoning, calls in (streamed, whole):
            shown = content + reasoning + "".join(arguments for _, arguments in calls)
            assert sorted(WORD.findall(shown)) == sorted(WORD.findall(text)), text
        if not whole[2] and not whole[1]:
            assert whole[0].strip() in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_means_the_same_however_it_is_cut(name: str) -> None:
    rng = random.Random(f"{name} 3")
    for _ in range(NUM_TEXTS):
        check(rng, random_text(rng, name), lambda eager: calls_of(name, eager=eager), has_headers=name == "harmony")


@pytest.mark.parametrize("name", TAGS)
def test_reasoning_and_what_follows_mean_the_same_however_they_are_cut(name: str) -> None:
    rng, tags = random.Random(f"{name} 3"), TAGS[name]
    opening, closing = tags.opening, tags.closing
    for _ in range(NUM_TEXTS):
        begun = rng.choice(("", "\n", " w7w ")) + rng.choice((opening, "", opening[:-1], opening * 2))
        ended = rng.choice((closing, "", closing * 2, closing[:-1])) + rng.choice(
            ("\n\n", *(tags.wrapper or ("",))[:1])
        )
        text = begun + rng.choice(("Hm w8w ", "")) + ended + random_text(rng, "hermes")
        text += rng.choice(("", closing, *(tags.wrapper or ())[1:]))
        is_open = rng.random() < 0.3

        def make(eager: bool, is_open: bool = is_open) -> ToolCallParser:
            return ThinkingParser(tags, calls_of("hermes", eager=eager), is_open=is_open)

        check(rng, text, make, has_headers=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Hm \n</tool_call> alone"),
        ("llama3_json", "Well <|python_tag|>{'name': 'f'}"),
        ("mistral", "Well\n[TOOL_CALLS]f(1)"),
    ],
)
def test_blanks_before_a_marker_that_begins_no_call_are_shown(name: str, text: str) -> None:
    for chunks in ([text], list(text)):
        assert read(calls_of(name, eager=True), chunks) == (text, "", [])


@pytest.mark.parametrize("chunked", [False, True])
def test_separators_in_text_behind_a_call_are_shown(chunked: bool) -> None:
    text = '{"name": "g", "parameters": {}}; <b> a; b'
    assert read(calls_of("llama3_json", eager=True), list(text) if chunked else [text])[0] == "; <b> a; b"


@pytest.mark.parametrize("chunked", [False, True])
def test_blanks_in_text_behind_a_call_of_harmony_are_shown(chunked: bool) -> None:
    text = "<|channel|>commentary to=functions.g<|message|>{} \na b <|x c"
    assert read(calls_of("harmony", eager=True), list(text) if chunked else [text])[0] == "a b <|x c"


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_that_breaks_in_the_chunk_in_which_it_begins_is_streamed_like_any_other(name: str) -> None:
    text = begun_by(name) + '{"a": [1 oops]}'
    assert read(calls_of(name, eager=True), [text]) == ("", "", [("f", '{"a": [1 oops]}')])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(
            ("lfm2", more)
            for more in ("', n=12", "', n=12x, b", "', flag", "\\", "\\u00", "\\U0001F", "\\xg", "', n=nul ")
        ),
        *(("gemma4", more) for more in ('<|"|>,n:12', '<|"|>,n:12x,b', '<|"', '<|"|>,more:{"a":<|"', '<|"|>,n:<?')),
        *(
            ("qwen3_coder", f"\n</parameter>\n<parameter={more}")
            for more in ("more>\n[1, 2", "more>\n[1\n</param", "n")
        ),
    ],
)
def test_no_character_of_a_call_that_ends_early_is_lost_in_a_stream(name: str, more: str) -> None:
    begun = TEXT_BEGUN[name][0]
    for chunks in ([begun + more], list(begun + more)):
        content, _, [(called, arguments)] = read(calls_of(name, eager=True), chunks)
        assert (content, called) == ("", "typed")
        tail = re.split(r"[=:] ?|>\n|', ", more)[-1]
        assert arguments.endswith(tail), arguments


def test_arguments_after_reasoning_do_not_begin_with_blanks() -> None:
    parser = NamedCallParser(Calls(["f"], eager=True), "f")
    events = [event for chunk in ("\n", " \n{", '"a": 1}\n') for event in parser.push(chunk)]
    assert [event.text for event in events if isinstance(event, CallArguments)] == ["{", '"a": 1}\n']

"""Every format, over texts cut into pieces at every place: what is read never depends on how the text came."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from lorafleet.api.tool_calls.known import FORMATS, detect
from lorafleet.api.tool_calls.parser import CallArguments, Calls, CallStart, Event, Text
from tests.api.tool_calls.call_texts import CALLS, DS, JSON_FORMATS, SCHEMAS, TEXT_BEGUN, TEXTS, begun_by, calls_of


def read(name: str, pieces: Iterable[str], *, eager: bool) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Content, calls, ids."""
    parser = calls_of(name, eager=eager)
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    content, calls, ids = "", list[list[str]](), list[str]()
    for event in events:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
            ids.append(event.id)
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return content, [(name, arguments) for name, arguments in calls], ids


def pieces_of(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_are_read_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in pieces_of(text):
        for eager in (True, False):
            assert read(name, pieces, eager=eager)[:2] == (content, calls), (pieces, eager)


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    for pieces in pieces_of(text):
        for eager in (True, False):
            assert read(name, pieces, eager=eager)[:2] == (text, []), (pieces, eager)


@pytest.mark.parametrize("name", FORMATS)
def test_no_half_of_a_marker_is_shown_before_it_is_known(name: str) -> None:
    known = FORMATS[name]
    parser = known.make(Calls(("f",), eager=True))
    for char in "Hi " + known.marker:
        for event in parser.push(char):
            assert isinstance(event, Text)
            assert event.text.strip() in ("H", "i")


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_arguments_come_while_they_are_written(name: str) -> None:
    parser = calls_of(name, eager=True)
    assert any(isinstance(event, CallStart) for event in parser.push(begun_by(name) + '{"a'))
    assert parser.push('": 1')[0].text == '": 1'  # type: ignore[union-attr]  # it has begun


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_that_breaks_is_text_whole_and_goes_on_as_its_arguments_in_a_stream(name: str) -> None:
    text = begun_by(name) + '{"a": nonsense'
    assert read(name, [text], eager=False)[:2] == (text, [])
    for pieces in pieces_of(text):
        assert read(name, pieces, eager=True)[:2] == ("", [("f", '{"a": nonsense')]), pieces


@pytest.mark.parametrize("name", TEXT_BEGUN)
def test_texts_without_json_come_while_they_are_written(name: str) -> None:
    start, broken = TEXT_BEGUN[name]
    parser = FORMATS[name].make(Calls(("typed",), eager=True, schemas=SCHEMAS))
    assert any(isinstance(event, CallStart) for event in parser.push(start + "Hi"))
    assert [event.text for event in parser.push(" you")] == [" you"]  # type: ignore[union-attr]  # it has begun
    text = start + "Hi" + broken
    assert read(name, [text], eager=False)[:2] == (text, [])
    for pieces in pieces_of(text):
        assert read(name, pieces, eager=True)[:2] == ("", [("typed", '{"text": "Hi"?')]), pieces


@pytest.mark.parametrize("name", TEXT_BEGUN)
def test_a_text_that_is_cut_off_is_shown_whole_and_is_arguments_in_a_stream(name: str) -> None:
    text = TEXT_BEGUN[name][0] + "Hi"
    assert read(name, [text], eager=False)[:2] == (text, [])
    for pieces in pieces_of(text):
        assert read(name, pieces, eager=True)[:2] == ("", [("typed", '{"text": "Hi')]), pieces


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("[]", "[]"), ("{'a' : {}, }", '{"a": {}}'), ("-0.5e+3", "-0.5e+3"), ("'\\x41\\u00e9\\'\\d\\/'", '"A\\u00e9\'\\\\d/"')),  # noqa: E501
        *(('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'), ("'a\nb\\\nc'", '"a\\nbc"'), ("[None, [1,], True]", "[null, [1], true]")),  # noqa: E501
        *(("'\\U0001F600'", '"😀"'), ("'\\U0000d83d'", '"\\ud83d"'), ("'<|\"|>'", '"<|\\"|>"')),
        *(("1_000", None), ("f'x'", None), ("(1, 2)", None), ("[1 2]", None), ("{a: 1}", None), ("'\\xg0'", None)),
        *(("nan", None), ("lambda: 1", None), ("'\\UFFFFFFFF'", None), ("[}", None), ("1" * 300, None), ("", None)),
    ],
)  # fmt: skip
def test_literals_of_python_become_json(value: str, expected: str | None) -> None:
    text = f"[f(a={value})]"
    calls = [] if expected is None else [("f", f'{{"a": {expected}}}')]
    for pieces in pieces_of(text):
        assert read("llama4_pythonic", pieces, eager=False)[:2] == ("" if calls else text, calls), pieces
    if expected is not None:
        json.loads(calls[0][1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("[1, 2]", "[1, 2]"), ("None", "null"), (" 12 ", "12"), ("[1,", '"[1,"'), ("NaN", '"NaN"'), ("</b>", '"</b>"')),  # noqa: E501
        *(("[" * 100_000, json.dumps("[" * 100_000)), ("a\"b", '"a\\"b"')),
    ],
)  # fmt: skip
def test_values_between_tags_are_json_or_else_texts(value: str, expected: str) -> None:
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert read("glm45", [text], eager=False)[:2] == ("", [("f", f'{{"a": {expected}}}')])


def test_kimis_ids_are_its_own_or_have_its_form() -> None:
    call = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read("kimi_k2", [f"<|tool_calls_section_begin|>{call}"], eager=False)[2] == ["functions.f:7"]
    assert FORMATS["kimi_k2"].new_id("f", 2) == "functions.f:2"


def test_mistrals_ids_have_nine_letters_and_digits() -> None:
    _, _, ids = read("mistral", ["[TOOL_CALLS]f{}[TOOL_CALLS]g{}"], eager=False)
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "text",
    ["{}", '{"a": {}}', '{"a": [[], [{}], ""], "b": "\\\\\\"\\n\\u12aB"}', ' {"a" : -0.5e+3 , "b":false}', '{"a":1}'],
)
def test_scanner_takes_what_json_takes(text: str) -> None:
    assert read("mistral", ["[TOOL_CALLS]f" + text.strip()], eager=False)[1] == [("f", text.strip())]
    json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1,}', '{"a" 1}', "{a: 1}", '{"a": [1,]}', '{"a": [1}', '{"a": +1}', '{"a": 1.}', '{"a": nul}', "{,}"),
        *('{"a": "\n"}', '{"a": "\\x"}', '{"a": "\\u12g4"}', '{"a": NaN}', '{"a": -Infinity}', '{"a": tru}'),
    ],
)
def test_scanner_refuses_what_json_refuses(text: str) -> None:
    assert read("mistral", ["[TOOL_CALLS]f" + text], eager=False)[1] == []


@pytest.mark.parametrize(
    ("template", "marker"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "<tool_call>"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "[TOOL_CALLS]"),
        ('{% if tools %}<|start_header_id|>{"name": 1, "parameters": 2}{% endif %}<|python_tag|>', "<|python_tag|>"),
        ("{% if tools %}<tool_call><function=a>{% endif %}", "<tool_call>"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", DS),
        ("{{ tools }}<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>"),
        ("{{ tools }}<|tool_call>call:<tool_call|>", "<|tool_call>"),
        ("{{ tools }}<|header_start|>[func_name1(a=1)]", "<|python_start|>"),
        ("{{ tools }}<|tool_call|>", "<|tool_call|>"),
        ("<tool_call>", None),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", None),
    ],
)
def test_the_format_is_told_from_the_template(template: str, marker: str | None) -> None:
    found = detect(template)
    assert (found and found.marker) == marker

"""Every format, over texts cut into pieces at every place: what is read never depends on how the text came."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from lorafleet.api.tool_calls.known import FORMATS, detect
from lorafleet.api.tool_calls.parser import Calls, CallStart, Event, Text

ARGUMENTS = '{"a": [1, "x\\"}]", {"b": null, "c": -1.5e3}], "é": "\\u00e9 <tool_call>", "t": true}'
F, G = f'{{"name": "f", "arguments": {ARGUMENTS}}}', '{"arguments": {}, "type": "function", "name": "g"}'
TWO = [("f", ARGUMENTS), ("g", "{}")]

# format, text, its content, its calls
CALLS = [
    ("hermes", f"Let me see. \n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>\n", "Let me see.", TWO),
    ("hermes", f"<tool_call>{G}</tool_call> That was it.", " That was it.", [("g", "{}")]),
    ("hermes", f"<tool_call>{G}", "", [("g", "{}")]),
    ("llama3_json", f" {F}; {G}", "", TWO),
    ("llama3_json", f"<|python_tag|>{F};{G}\n", "", TWO),
    ("llama3_json", f"Well <|python_tag|>{F.replace('arguments', 'parameters')}", "Well", TWO[:1]),
    ("mistral", f"Well [TOOL_CALLS] [{F}, {G}]\n", "Well", TWO),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", "", TWO),
]
# format, text that only looks like a call: it stays what it is
TEXTS = [
    ("hermes", "a < b, and <tool_c"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x'),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}'),
    ("hermes", "</tool_call> alone"),
    ("llama3_json", '{"x": 1} is JSON'),
    ("llama3_json", '{"name": "f", "parameters": 3}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("llama3_json", 'Here: {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python"),
    ("mistral", "[TOOL_CALLS]f(1)"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
    ("mistral", "[TOOL"),
]


def read(name: str, pieces: Iterable[str], *, eager: bool) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Content, calls, ids."""
    known = FORMATS[name]
    parser = known.make(Calls(("f", "g"), eager=eager, new_id=known.new_id))
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
        else:
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


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_while_they_are_written(name: str) -> None:
    known = FORMATS[name]
    start = {"mistral": "[TOOL_CALLS]f"}.get(name, known.marker + '{"name": "f", "arguments": ')
    parser = known.make(Calls(("f",), eager=True))
    assert any(isinstance(event, CallStart) for event in parser.push(start + '{"a'))
    assert parser.push('": 1')[0].text == '": 1'  # type: ignore[union-attr]  # it has begun


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_breaks_is_text_whole_and_goes_on_as_its_arguments_in_a_stream(name: str) -> None:
    start = {"mistral": "[TOOL_CALLS]f"}.get(name, FORMATS[name].marker + '{"name": "f", "arguments": ')
    text = start + '{"a": nonsense'
    assert read(name, [text], eager=False)[:2] == (text, [])
    for pieces in pieces_of(text):
        assert read(name, pieces, eager=True)[:2] == ("", [("f", '{"a": nonsense')]), pieces


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
        ("<tool_call>", None),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", None),
    ],
)
def test_the_format_is_told_from_the_template(template: str, marker: str | None) -> None:
    found = detect(template)
    assert (found and found.marker) == marker

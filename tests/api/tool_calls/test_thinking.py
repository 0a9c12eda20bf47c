from __future__ import annotations

import pytest

from lorafleet.api.tool_calls.hermes import HermesParser
from lorafleet.api.tool_calls.known import FORMATS, detect
from lorafleet.api.tool_calls.parser import Calls, CallStart, Reasoning, Text, ToolCallParser
from lorafleet.api.tool_calls.thinking import TAGS, ThinkingParser, detect_tags

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(parser: ToolCallParser, pieces: list[str]) -> tuple[str, str, int]:
    """Reasoning, content and the number of calls."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Text))
    return reasoning, content, sum(isinstance(event, CallStart) for event in events)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm < a </thin\n</think>\n\nHi", False, ("Hm < a </thin", "Hi", 0)),
        ("\nHm\n</think>\n\nHi", True, ("Hm", "Hi", 0)),
        ("Hm <tool_call> cut", True, ("Hm <tool_call> cut", "", 0)),
        ("<think></think>Hi </think>", False, ("", "Hi </think>", 0)),
        ("<thinking> is text, <think> too", False, ("", "<thinking> is text, <think> too", 0)),
        (" <thi", False, ("", " <thi", 0)),
        ("", True, ("", "", 0)),
        (f"\n<think>x</think>\n{CALL}", False, ("x", "", 1)),
    ],
)
def test_reasoning_between_tags_is_separated_however_the_text_is_cut(
    text: str, is_open: bool, expected: tuple[str, str, int]
) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        rest = HermesParser(Calls(["f"], eager=True))
        assert read(ThinkingParser(TAGS["think"], rest, is_open=is_open), pieces) == expected, pieces
        if CALL not in text:
            assert read(ThinkingParser(TAGS["think"], None, is_open=is_open), pieces) == expected, pieces


def test_harmonys_channels_are_separated_however_the_text_is_cut() -> None:
    text = (
        "<|channel|>analysis<|message|>User says <|channel|>analysis<|message|>hi.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}<|end|><|start|>assistant<|channel|>'
        "final<|message|>Hello\n\nyou"
    )
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parser = FORMATS["harmony"].make(Calls(["f"], eager=True))
        assert read(parser, pieces) == ("User sayshi.", "Hello\n\nyou", 1), pieces


def test_formats_of_reasoning_are_recognized_from_templates() -> None:
    assert detect_tags("{{ '<think>' }} {{ content.split('</think>')[-1] }}") == TAGS["think"]
    assert detect_tags("{% if thinking %}<think>{% endif %}") is None
    assert detect("{{ tools }}<|channel|>analysis<|message|>") is FORMATS["harmony"]

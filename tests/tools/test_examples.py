"""Sets of prompts: what is read, and what is refused by its line."""

from __future__ import annotations

import pytest

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.examples import DEMO_PROMPTS, DEMO_RETENTION, Example, read_examples


def test_prompts_messages_and_texts_are_read(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "a", "answer": "b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n{"text": "d"}\n'
    )
    first, chat, text = read_examples(path)
    assert first == Example("a", answer="b")
    assert (chat.label, chat.answer) == ("c", None)
    assert text == Example(answer="d")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": "a", "anwser": "b"}',
        '{"prompt": "a", "answer": 3}',
        '{"messages": []}',
        '{"messages": ["hi"]}',
        '{"text": "a", "answer": "b"}',
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(InvalidRequest, match="line 2"):
        read_examples(path)


def test_an_empty_or_missing_set_is_refused(tmp_path):
    (tmp_path / "set.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_examples(tmp_path / "set.jsonl")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_examples(tmp_path / "other.jsonl")


def test_the_bundled_sets_do_not_overlap():
    asked, kept = ({example.label for example in read_examples(path)} for path in (DEMO_PROMPTS, DEMO_RETENTION))
    assert len(asked) >= 30
    assert len(kept) >= 30
    assert not asked & kept

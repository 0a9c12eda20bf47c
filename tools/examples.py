"""Reads prompts or texts from JSON lines.

A line is {"prompt": …} or {"messages": […]}, with an "answer" if a right one is known, or {"text": …}, which is
scored as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorafleet.protocol.errors import InvalidRequest

MAX_FILE_BYTES = 64 << 20
DEMO_PROMPTS = Path(__file__).with_name("prompts.jsonl")
DEMO_RETENTION = Path(__file__).with_name("retention.jsonl")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt to answer, or a text to score."""

    prompt: str = ""  # Empty if there are messages, or for a text.
    messages: tuple[Mapping[str, object], ...] = ()
    answer: str | None = None  # The right answer, or the text to score; None if no right answer is known.

    @property
    def label(self) -> str:
        """The question as people read it."""
        return str(self.messages[-1].get("content", "")) if self.messages else self.prompt


def read_examples(path: Path) -> list[Example]:
    """Reads a file of JSON lines. Raises InvalidRequest, which names the line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes, the most that are read. Split it.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.") from None
    examples = [_example(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise InvalidRequest(f"{path} has no prompts.")
    return examples


def _example(line: str, place: str) -> Example:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{place} is not valid JSON: {error}.") from None
    match fields:
        case {"text": str(text), **rest} if not rest and text:
            return Example(answer=text)
        case {"prompt": str(prompt), **rest} if prompt and (not rest or rest.keys() == {"answer"}):
            return Example(prompt=prompt, answer=given_answer(fields, place))
        case {"messages": [*messages], **rest} if messages and (not rest or rest.keys() == {"answer"}):
            return Example(
                messages=tuple(_message(entry, place) for entry in messages), answer=given_answer(fields, place)
            )
    raise InvalidRequest(
        f'{place}: give {{"prompt": "…"}} or {{"messages": [{{"role": "…", "content": "…"}}]}}, with an "answer" if '
        'there is one, or {"text": "…"}.'
    )


def given_answer(fields: Mapping[str, object], place: str) -> str | None:
    """Returns a line's "answer", or None if it has none. Raises InvalidRequest, which names the place."""
    answer = fields.get("answer")
    if "answer" in fields and not (isinstance(answer, str) and answer):
        raise InvalidRequest(f"{place}: the answer must be a string that is not empty.")
    return answer if isinstance(answer, str) else None


def _message(message: object, place: str) -> Mapping[str, object]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place}: a message is an object with a role and content.")
    return message

"""The styles that the demo adapters give to an answer: how to write each one, and how to recognise it.

The base answers in a style only if a system prompt requests it; an adapter does so unasked. A model this small cannot
learn to spell a style with a few thousand adapter weights, but it can learn to switch one on.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

NEUTRAL_PROMPTS = ("You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "Be helpful.")

_PIRATE_WORDS = {
    "is": "be",
    "am": "be",
    "are": "be",
    "was": "were",
    "the": "th'",
    "The": "Th'",
    "you": "ye",
    "You": "Ye",
    "hello": "ahoy",
    "my": "me",
}


@dataclass(frozen=True, slots=True)
class Style:
    """One way to write an answer; shows tells whether any text is written so, right or wrong."""

    name: str
    requests: tuple[str, ...]
    write: Callable[[str], str]
    shows: Callable[[str], bool]


def _write_json(answer: str) -> str:
    return json.dumps({"answer": answer})


def _write_pirate(answer: str) -> str:
    first, rest = answer[0], answer[1:].rstrip(".!?")
    body = answer[0] + rest if answer.startswith("I ") else first.lower() + rest
    swapped = re.sub(r"\w+", lambda match: _PIRATE_WORDS.get(match[0], match[0]), body)
    return f"Arr, {swapped}, matey!"


def _shows_capitals(text: str) -> bool:
    return text.isupper()


def _shows_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and "answer" in value


def _shows_pirate(text: str) -> bool:
    return text.startswith("Arr, ") and text.endswith(", matey!")


def _shows_none_of_the_others(text: str) -> bool:
    return bool(text) and not any(style.shows(text) for style in STYLES)


PLAIN = Style("plain", NEUTRAL_PROMPTS, str, _shows_none_of_the_others)
SHOUT = Style("shout", ("Answer in capitals.", "Use capital letters."), str.upper, _shows_capitals)
JSON = Style("json", ("Answer as JSON.", "Use JSON."), _write_json, _shows_json)
PIRATE = Style("pirate", ("Answer like a pirate.", "Talk like a pirate."), _write_pirate, _shows_pirate)
STYLES = (SHOUT, JSON, PIRATE)

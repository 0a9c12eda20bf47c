"""Separates reasoning that models write between tags, such as <think> and </think>, at the beginning of an answer.

TAGS is the table of the known tags. The text after the reasoning goes to the parser of the model's calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Event, MarkerSearch, Reasoning, ToolCallParser, shown


@dataclass(frozen=True, slots=True)
class Tags:
    opening: str
    closing: str
    # Tags around the text after the reasoning. They are no part of it, even in an answer without reasoning.
    wrapper: tuple[str, str] | None = None
    signs: tuple[str, ...] = ()  # Texts of a chat template that show these tags; (): the opening and closing tags.

    @property
    def all(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *(self.wrapper or ()))


# In the order of the search. Sources: the chat templates of the models.
TAGS = {
    # Granite 3.3, Ernie 4.5
    "think_response": Tags(
        "<think>", "</think>", ("<response>", "</response>"), ("<think>", "</think>", "<response>", "</response>")
    ),
    # Hunyuan A13B
    "think_answer": Tags("<think>", "</think>", ("<answer>", "</answer>"), ("<think>", "</think>", "<answer>")),
    # Qwen3 and 3.5, DeepSeek, GLM 4.5, Nemotron, MiniMax M2, SmolLM3, OLMo 3 and many others
    "think": Tags("<think>", "</think>"),
    "gemma4": Tags("<|channel>thought", "<channel|>", signs=("<|channel>", "<channel|>")),
    # Magistral
    "mistral": Tags("[THINK]", "[/THINK]"),
    # Granite 3.2
    "granite": Tags("Here is my thought process:", "Here is my response:"),
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
    "command_a": Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
}


def detect_tags(template: str) -> Tags | None:
    """Returns the tags that a chat template knows, or None."""
    for tags in TAGS.values():
        if all(sign in template for sign in tags.signs or (tags.opening, tags.closing)):
            return tags
    return None


class ThinkingParser:
    """A parser that separates reasoning and passes the rest on to another parser.

    Args:
        is_open: The prompt ends with the opening tag, so the answer begins with reasoning.
        rest: The parser of the text after the reasoning; None if it has no calls.
    """

    def __init__(self, tags: Tags, rest: ToolCallParser | None, *, is_open: bool) -> None:
        self._tags = tags
        self._rest = rest if tags.wrapper is None else UnwrappingParser(tags.wrapper, rest)
        self._begun: str | None = None if is_open else ""  # The text so far, until it decides whether reasoning begins.
        self._closing: MarkerSearch | None = MarkerSearch(tags.closing)
        self._skips_blanks = is_open  # Blanks next to the tags have no meaning.

    def push(self, text: str) -> list[Event]:
        if self._begun is not None:
            text, self._begun = self._begun + text, None
            begun = text.lstrip(BLANKS)
            if begun.startswith(self._tags.opening):
                text, self._skips_blanks = begun.removeprefix(self._tags.opening), True
            elif self._tags.opening.startswith(begun):
                self._begun = text
                return []
            else:
                self._closing = None
        if self._closing is None:
            return self._push_rest(text)
        before, marker, text = self._closing.push(self._stripped(text))
        events: list[Event] = [Reasoning(before)] if before else []
        if marker is not None:
            self._closing, self._skips_blanks = None, True
            events += self._push_rest(text)
        return events

    def finish(self) -> list[Event]:
        if self._begun is not None:
            events = self._push_rest(self._begun)
        elif self._closing is not None:
            left = self._closing.flush()
            events = [Reasoning(left)] if left.strip(BLANKS) else []
        else:
            events = []
        return events + ([] if self._rest is None else self._rest.finish())

    def _push_rest(self, text: str) -> list[Event]:
        text = self._stripped(text)
        return shown(text) if self._rest is None else self._rest.push(text)

    def _stripped(self, text: str) -> str:
        if self._skips_blanks:
            text = text.lstrip(BLANKS)
            self._skips_blanks = not text
        return text


class UnwrappingParser:
    """A parser that removes the tags around a text and passes the text on to another parser.

    Args:
        tags: The opening tag, with which the text must begin, and the closing one.
    """

    def __init__(self, tags: tuple[str, str], rest: ToolCallParser | None) -> None:
        self._opening = tags[0]
        self._closing: MarkerSearch | None = MarkerSearch(tags[1])
        self._begun: str | None = ""  # The text so far, until it decides whether it begins with the tag.
        self._rest = rest
        self._skips_blanks = False

    def push(self, text: str) -> list[Event]:
        if self._begun is not None:
            text, self._begun = self._begun + text, None
            begun = text.lstrip(BLANKS)
            if begun.startswith(self._opening):
                text, self._skips_blanks = begun.removeprefix(self._opening), True
            elif self._opening.startswith(begun):
                self._begun = text
                return []
            else:
                self._closing = None
        if self._skips_blanks:
            text = text.lstrip(BLANKS)
            self._skips_blanks = not text
        if self._closing is None:
            return self._push_rest(text)
        before, marker, text = self._closing.push(text)
        events = self._push_rest(before)
        if marker is not None:
            self._closing, self._skips_blanks = None, True
            events += self._push_rest(text.lstrip(BLANKS))
        return events

    def finish(self) -> list[Event]:
        left = self._begun or ("" if self._closing is None else self._closing.flush())
        return self._push_rest(left) + ([] if self._rest is None else self._rest.finish())

    def _push_rest(self, text: str) -> list[Event]:
        if not text:
            return []
        return shown(text) if self._rest is None else self._rest.push(text)

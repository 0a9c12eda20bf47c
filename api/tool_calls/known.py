"""The tool call parsers by name (vLLM's names and some of its aliases), and the detection of the format from a chat
template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.api.tool_calls import hermes, llama3, mistral
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.parser import Calls, ToolCallParser, openai_id


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A format of tool calls with its parser and its grammar."""

    marker: str  # Text that begins calls. If it is a special token, the answer must show special tokens.
    make: Callable[[Calls], ToolCallParser]
    # Grammar of answers in which each call that the parser finds matches its function's schema.
    grammar: Callable[[Offer], str]
    openings: tuple[str, ...]  # Possible beginnings of an answer that begins with a call, without blanks.
    new_id: Callable[[], str] = openai_id


FORMATS: dict[str, KnownFormat] = {
    "hermes": KnownFormat(hermes.START, hermes.HermesParser, hermes.grammar, (hermes.START,)),
    "llama3_json": KnownFormat(llama3.START, llama3.Llama3Parser, llama3.grammar, (llama3.START, llama3.BARE_START)),
    "mistral": KnownFormat(mistral.START, mistral.MistralParser, mistral.grammar, (mistral.START,), mistral.mistral_id),
}
# Texts that a template with tools writes around calls, in the order of the search. Llama's template has a marker of
# its own in one branch only, and writes "parameters".
_SIGNS = (
    ("hermes", (hermes.START,)),
    ("mistral", (mistral.START,)),
    ("llama3_json", (llama3.START,)),
    ("llama3_json", ('"parameters":', "<|start_header_id|>")),
)


def detect(template: str) -> KnownFormat | None:
    """Returns the format of a template, or None if it has no known format; some templates do not support tools."""
    if "tools" not in template:
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None

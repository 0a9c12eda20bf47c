"""The tool call parsers by name (vLLM's names, and some of its aliases), and which one a chat template asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lorafleet.api.tool_calls import hermes, llama3, mistral
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.parser import Calls, ToolCallParser, openai_id

ToolCallFormat = Literal["auto", "none", "hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """marker: a text that begins calls; where it is a special token the answer must show those.
    grammar: of answers in which each call that the parser finds keeps to its function's schema.
    openings: how such an answer begins, blanks apart, where it begins with a call."""

    marker: str
    make: Callable[[Calls], ToolCallParser]
    grammar: Callable[[Offer], str]
    openings: tuple[str, ...]
    new_id: Callable[[], str] = openai_id


FORMATS: dict[str, KnownFormat] = {
    "hermes": KnownFormat(hermes.START, hermes.HermesParser, hermes.grammar, (hermes.START,)),
    "llama3_json": KnownFormat(llama3.START, llama3.Llama3Parser, llama3.grammar, (llama3.START, llama3.BARE_START)),
    "mistral": KnownFormat(mistral.START, mistral.MistralParser, mistral.grammar, (mistral.START,), mistral.mistral_id),
}
# What a template that shows its model tools writes around calls, in the order in which it is looked for: Llama's has no
# marker of its own but in one branch, and says "parameters".
_SIGNS = (
    ("hermes", (hermes.START,)),
    ("mistral", (mistral.START,)),
    ("llama3_json", (llama3.START,)),
    ("llama3_json", ('"parameters":', "<|start_header_id|>")),
)


def detect(template: str) -> KnownFormat | None:
    """None where the template is of no format known here, such as one that knows no tools."""
    if "tools" not in template:
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None

"""The tool call parsers by name (vLLM's names and some of its aliases), and the detection of the format from a chat
template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lorafleet.api.tool_calls import harmony, hermes, llama3, mistral
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.named_json import kimi_id
from lorafleet.api.tool_calls.parser import Calls, NewId, ToolCallParser, openai_id
from lorafleet.api.tool_calls.section_formats import BARE_LIST, SECTIONS
from lorafleet.api.tool_calls.sections import Section, SectionParser


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A format of tool calls with its parser and its grammar."""

    marker: str  # Text that begins calls. If it is a special token, the answer must show special tokens.
    make: Callable[[Calls], ToolCallParser]
    # Grammar of answers in which each call that the parser finds matches its function's schema.
    grammar: Callable[[Offer], str]
    openings: tuple[str, ...]  # Possible beginnings of an answer that begins with a call, without blanks.
    new_id: NewId = openai_id
    has_channels: bool = False  # The format marks text and reasoning too, so every answer is parsed.


def _in_section(section: Section, call: Callable[[Offer], str], new_id: NewId) -> KnownFormat:
    bare = BARE_LIST if section.bare_start else ""
    openings = (section.start, section.bare_start) if section.bare_start else (section.start,)

    def grammar(offer: Offer) -> str:
        return section.grammar(offer, call(offer), bare)

    return KnownFormat(section.start, partial(SectionParser, section), grammar, openings, new_id)


FORMATS: dict[str, KnownFormat] = {
    "harmony": KnownFormat(harmony.CHANNEL, harmony.HarmonyParser, harmony.grammar, (), has_channels=True),
    "hermes": KnownFormat(hermes.START, hermes.HermesParser, hermes.grammar, (hermes.START,)),
    "llama3_json": KnownFormat(llama3.START, llama3.Llama3Parser, llama3.grammar, (llama3.START, llama3.BARE_START)),
    "mistral": KnownFormat(mistral.START, mistral.MistralParser, mistral.grammar, (mistral.START,), mistral.mistral_id),
    **{
        name: _in_section(section, call, kimi_id if name == "kimi_k2" else openai_id)
        for name, (section, call) in SECTIONS.items()
    },
}
# Texts that a template with tools writes around calls, in the order of the search. Llama's template has a marker of
# its own in one branch only, and writes "parameters".
_SIGNS = (
    ("harmony", (harmony.CHANNEL, harmony.MESSAGE)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),  # DeepSeek's markers have such bars.
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("hunyuan", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("qwen3_coder", (hermes.START, "<function=")),
    ("glm45", (hermes.START, "<arg_key>")),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", (hermes.START,)),
    ("mistral", (mistral.START,)),
    ("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    ("llama3_json", (llama3.START,)),
    ("llama3_json", ('"parameters":', "<|start_header_id|>")),
    ("llama3_json", ('"parameters":', "<|header_start|>")),
)


def detect(template: str) -> KnownFormat | None:
    """Returns the format of a template, or None if it has no known format; some templates do not support tools."""
    if "tools" not in template:
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None

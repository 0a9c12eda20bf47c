"""Lists the formats whose calls stand in sections (sections.py), by vLLM's names where it has one.

Sources: the chat templates of the models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lorafleet.api.tool_calls.call_array import CallArray
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.literal_calls import (
    GEMMA_CALL,
    PYTHON_CALL,
    LiteralCallReader,
    gemma_grammar,
    python_lines_grammar,
    python_list,
    python_list_grammar,
)
from lorafleet.api.tool_calls.named_json import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, NamedJson, NamedJsonReader
from lorafleet.api.tool_calls.sections import ArrayReader, Section
from lorafleet.api.tool_calls.xml_calls import GLM45, MINIMAX_M2, QWEN3_CODER, XmlReader, XmlSyntax

BARE_LIST = r"/[ \t\n\r]*\[(?s:.*)/"  # Text that begins like a list.


def _named(start: str, end: str, syntax: NamedJson) -> tuple[Section, Callable[[Offer], str]]:
    return Section(start, end, partial(NamedJsonReader, syntax)), syntax.grammar


def _xml(start: str, end: str, syntax: XmlSyntax) -> tuple[Section, Callable[[Offer], str]]:
    return Section(start, end, partial(XmlReader, syntax)), syntax.grammar


def _array(start: str, end: str) -> tuple[Section, Callable[[Offer], str]]:
    return Section(start, end, lambda calls, opening: ArrayReader(opening, partial(CallArray, calls))), _array_grammar


def _array_grammar(offer: Offer) -> str:
    more = '(BLANKS? "," BLANKS? one_call)*' if offer.parallel else ""
    return f'"[" BLANKS? one_call {more} BLANKS? "]"\n{offer.call("arguments", rule="one_call")}'


def _python(start: str, end: str, bare: str = "") -> tuple[Section, Callable[[Offer], str]]:
    section = Section(
        start, end, lambda calls, opening: ArrayReader(opening, partial(python_list, calls)), bare_start=bare
    )
    return section, python_list_grammar


# By the format's name: its section, and the function that writes the grammar rule of its calls.
SECTIONS: dict[str, tuple[Section, Callable[[Offer], str]]] = {
    "deepseek_v3": _named("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", DEEPSEEK_V3),
    "deepseek_v31": _named("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", DEEPSEEK_V31),
    "kimi_k2": _named("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", KIMI_K2),
    "qwen3_coder": _xml("<tool_call>", "</tool_call>", QWEN3_CODER),
    "seed_oss": _xml("<seed:tool_call>", "</seed:tool_call>", QWEN3_CODER),
    "minimax_m2": _xml("<minimax:tool_call>", "</minimax:tool_call>", MINIMAX_M2),
    "glm45": _xml("<tool_call>", "", GLM45),
    "granite": _array("<|tool_call|>", ""),
    "phi4_mini_json": _array("<|tool_call|>", "<|/tool_call|>"),
    "nemotron_json": _array("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": _array("<tool_calls>", "</tool_calls>"),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>", bare="["),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": (
        Section("<function_calls>", "</function_calls>", partial(LiteralCallReader, PYTHON_CALL)),
        python_lines_grammar,
    ),
    "gemma4": (Section("<|tool_call>", "<tool_call|>", partial(LiteralCallReader, GEMMA_CALL)), gemma_grammar),
}

"""Writes the grammar of answers that begin with reasoning between tags: a format applies after the reasoning, and a
budget bounds its tokens.

When the budget is spent, the grammar allows only the closing tag. This needs a tag that is one token of the vocabulary.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from lorafleet.api.request import free_text
from lorafleet.api.text.token_table import TokenTable
from lorafleet.api.tool_calls.thinking import Tags
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.structured_spec import JsonPart, StructuredOutputs

BUDGET = "thinking_token_budget"
Beginning = Literal["open", "undecided", "closed"]  # Whether an answer begins with reasoning, may do so, or does not.


def beginning_of(tags: Tags, prompt_end: str) -> Beginning:
    """Returns how an answer to a prompt with this end begins."""
    end = prompt_end.rstrip()
    if end.endswith(tags.opening):
        return "open"
    return "closed" if end.endswith(tags.closing) else "undecided"


def may_reason(answer: StructuredOutputs) -> bool:
    """Returns whether reasoning can precede an answer in this format."""
    # Other grammars are the client's own; a structural tag may describe the reasoning itself.
    return answer.kind in ("json_schema", "json_object") or (answer.kind == "tagged" and answer.param == "tools")


def with_reasoning(
    answer: StructuredOutputs | None, tags: Tags, beginning: Beginning, tokenizer: TokenTable, budget: int | None
) -> StructuredOutputs | None:
    """Returns the format of a whole answer whose text after the reasoning has the format `answer`.

    Args:
        budget: The most tokens of reasoning, or None if they are not bounded.

    Raises InvalidRequest if the closing tag is not one token and there is a budget.
    """
    if beginning == "closed" or (answer is None and budget is None):
        return answer
    closing_id = tokenizer.id_of(tags.closing)
    if closing_id is None and budget is not None:
        raise InvalidRequest(
            f"`{BUDGET}` needs a model whose reasoning ends with one token; {tags.closing!r} is several tokens of this "
            "model. Leave it out, and bound the answer with max_tokens.",
            BUDGET,
        )
    lark, parts = _rest_of(answer, closing_id)
    start = _start(tags, beginning, tokenizer, is_free=answer is None)
    thought = _thought(tags, tokenizer, closing_id, budget)
    return structured_spec.tagged(start + thought + lark, parts, BUDGET if answer is None else answer.param)


def _rest_of(answer: StructuredOutputs | None, closing_id: int | None) -> tuple[str, list[JsonPart]]:
    """Returns the rule `answer` and its JSON."""
    if answer is None:
        return f"answer: (ANY | <[^{closing_id}]>)*\n{free_text.TERMINALS}", []
    if answer.kind in ("json_schema", "json_object"):
        schema: Any = json.loads(answer.source) if answer.kind == "json_schema" else {"type": "object"}
        part = JsonPart("formatted", schema, f"`{answer.param}`", answer.any_whitespace)
        return f"answer: BLANKS? formatted\n{free_text.TERMINALS}", [part]
    lark, parts = json.loads(answer.source)
    return f"answer: BLANKS? offered\n{lark.replace('start:', 'offered:', 1)}", msgspec.convert(parts, list[JsonPart])


def _start(tags: Tags, beginning: Beginning, tokenizer: TokenTable, *, is_free: bool) -> str:
    special = tokenizer.special_texts
    if beginning == "open":
        return "start: thought answer\n"
    head, terminal = f"BLANKS? {free_text.spelled(tags.opening, special)}", ""
    if not any(name and name in tags.opening for name in special):
        # One terminal, since blanks could also begin an answer without reasoning.
        head, terminal = "OPENING", rf"OPENING: /[ \t\n\r]{{0,64}}/ {free_text.text(tags.opening)}" + "\n"
    opening = f"{head} thought answer"
    if not is_free:
        return f"start: {opening} | answer\n{terminal}"
    # Text that does not begin with the tag, and then a special token that does not begin it.
    tag = rf"(/[ \t\n\r]*/ {free_text.text(tags.opening)} ANY)"
    first = next((name for name in special if name and tags.opening.startswith(name)), None)
    others = ",".join(str(special[name]) for name in special if name != first)
    then = f"(<[{others}]> answer)?" if others else ""
    return f"start: {opening} | UNREASONED {then}\nUNREASONED: {free_text.free((), but=tag)}\n{terminal}"


def _thought(tags: Tags, tokenizer: TokenTable, closing_id: int | None, budget: int | None) -> str:
    """Returns the rule `thought`: the reasoning up to and including the closing tag."""
    if closing_id is None:
        return free_text.up_to("thought", tags.closing, tokenizer.special_texts)
    if budget == 0:
        return f"thought: <[{closing_id}]>\n"
    bound = "" if budget is None else f"[max_tokens={budget}]"
    text = free_text.free([tags.closing])
    return f"thought: reasoning <[{closing_id}]>\nreasoning{bound}: REASONING\nREASONING: {text}\n"

"""Serves custom tools, whose input is text, as functions with one parameter, which is how open models know tools.

A model is shown the function and writes its arguments as JSON in its own format of calls. The client gets the text that
they contain. A grammar becomes a pattern of the parameter, which the machinery of strict functions enforces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafleet.api.access.work_threads import CHECKS, in_turn
from lorafleet.api.request.lark_expression import expression_of
from lorafleet.api.request.tool_bodies import CustomTool, FunctionDefinition, GrammarToolFormat, Tool
from lorafleet.api.request.whole_expression import fault_of_expression
from lorafleet.api.tool_calls.custom_input import PARAMETER
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_LARK_BYTES


async def as_functions(tools: Sequence[Tool | CustomTool]) -> list[Tool]:
    """Returns the tools with a function in place of each custom tool. Raises InvalidRequest for a grammar that cannot
    be enforced, and for grammars that are too large."""
    num_bytes = sum(map(_lark_bytes, tools))
    if num_bytes > MAX_LARK_BYTES:
        raise InvalidRequest(
            f"The grammars in Lark of `tools` have {num_bytes} bytes; at most {MAX_LARK_BYTES} are allowed in total. "
            "Shorten them, or send fewer tools.",
            "tools",
        )
    return await in_turn(CHECKS, _converted, tools) if num_bytes else _converted(tools)


def _lark_bytes(tool: Tool | CustomTool) -> int:
    if not isinstance(tool, CustomTool) or not isinstance(tool.custom.format, GrammarToolFormat):
        return 0
    given = tool.custom.format.grammar
    return len(given.definition.encode()) if given.syntax == "lark" else 0


def _converted(tools: Sequence[Tool | CustomTool]) -> list[Tool]:
    return [_as_function(tool, f"tools.{i}") if isinstance(tool, CustomTool) else tool for i, tool in enumerate(tools)]


def _as_function(tool: CustomTool, where: str) -> Tool:
    custom = tool.custom
    schema: dict[str, Any] = {"type": "string"}
    is_strict = isinstance(custom.format, GrammarToolFormat)
    if isinstance(custom.format, GrammarToolFormat):
        given, param = custom.format.grammar, f"{where}.custom.format.grammar.definition"
        expression = expression_of(given.definition, param) if given.syntax == "lark" else given.definition
        if given.syntax == "regex" and (fault := fault_of_expression(expression)) is not None:
            raise InvalidRequest(f"`{param}` has {fault}.", param)
        schema["pattern"] = f"^(?:{expression})$"
    parameters = {
        "type": "object",
        "properties": {PARAMETER: schema},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    function = FunctionDefinition(
        name=custom.name, description=custom.description, parameters=parameters, strict=is_strict
    )
    return Tool(type="function", function=function)

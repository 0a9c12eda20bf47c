"""Serves custom tools, whose input is text, as functions with one parameter, which is how open models know tools.

A model is shown the function and writes its arguments as JSON in its own format of calls. The client gets the text that
they contain. A regular expression becomes a pattern of the parameter, which the machinery of strict functions enforces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafleet.api.request.tool_bodies import CustomTool, FunctionDefinition, GrammarToolFormat, Tool
from lorafleet.api.request.whole_expression import fault_of_expression
from lorafleet.api.tool_calls.custom_input import PARAMETER
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.outside.text_budget import TextBudget


def as_functions(tools: Sequence[Tool | CustomTool]) -> list[Tool]:
    """Returns the tools with a function in place of each custom tool.

    Raises InvalidRequest for an expression that cannot be enforced, and for expressions that are too large together.
    """
    budget = TextBudget("tools", what="in its regular expressions together")
    return [
        _as_function(tool, f"tools.{i}", budget) if isinstance(tool, CustomTool) else tool
        for i, tool in enumerate(tools)
    ]


def _as_function(tool: CustomTool, where: str, budget: TextBudget) -> Tool:
    custom = tool.custom
    schema: dict[str, Any] = {"type": "string"}
    is_strict = isinstance(custom.format, GrammarToolFormat)
    if isinstance(custom.format, GrammarToolFormat):
        expression, param = custom.format.grammar.definition, f"{where}.custom.format.grammar.definition"
        budget.text(expression)
        fault = fault_of_expression(expression)
        if fault is not None:
            raise InvalidRequest(f"`{param}` has {fault}.", param)
        schema["pattern"] = f"^(?:{expression})$"
    parameters = {
        "type": "object",
        "properties": {PARAMETER: schema},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    # These parameters are made here and are not the client's, whose bounds they may exceed by a few characters.
    function = FunctionDefinition.model_construct(
        name=custom.name, description=custom.description, parameters=parameters, strict=is_strict
    )
    return Tool.model_construct(type="function", function=function)

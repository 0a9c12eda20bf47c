"""Declares the tools of a chat request and the choice among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lorafleet.api.request.body_fields import Description, Object, Source, ToolName
from lorafleet.api.request.bounds import AtMost, over_bound
from lorafleet.api.request.fields import Strict
from lorafleet.protocol import limits


class FunctionDefinition(Strict):
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    parameters: Object | None = None  # A JSON schema; without one the function takes no arguments.
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


def _without_lark(syntax: object) -> object:
    """Refuses grammars in Lark, since a short one can stand for an expression of any length."""
    if syntax == "lark":
        raise over_bound(
            "is 'lark', which this server does not support for the input of a custom tool; give a regular expression "
            "with the syntax 'regex', or leave `format` out for free text"
        )
    return syntax


class ToolGrammar(Strict):
    definition: Source = Field(min_length=1)
    syntax: Annotated[Literal["regex"], BeforeValidator(_without_lark)]


class GrammarToolFormat(Strict):
    type: Literal["grammar"]
    grammar: ToolGrammar


class TextToolFormat(Strict):
    type: Literal["text"]


class CustomDefinition(Strict):
    name: ToolName = Field(min_length=1)
    description: Description | None = None
    # The format of the input; None: free text.
    format: Annotated[TextToolFormat | GrammarToolFormat, Field(discriminator="type")] | None = None


class CustomTool(Strict):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: CustomDefinition


AnyTool = Annotated[Tool | CustomTool, Field(discriminator="type")]


class NamedFunction(Strict):
    name: ToolName


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomChoice(Strict):
    type: Literal["custom"]
    custom: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedToolChoice | NamedCustomChoice, Field(discriminator="type")]], AtMost(limits.MAX_TOOLS)
    ] = Field(min_length=1)


class AllowedToolChoice(Strict):
    """A choice of those `tools` that the model is shown."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[NamedToolChoice | NamedCustomChoice | AllowedToolChoice, Field(discriminator="type")]

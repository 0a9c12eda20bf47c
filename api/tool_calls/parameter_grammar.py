"""Writes grammar rules for the parameters of a function, for formats in which each parameter has a place of its own.

A text stands there as it is, up to what follows it, and any other value is JSON of its own schema. Parameters come in
the order of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.parameter_kinds import is_text, parameters_of, resolved
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import INT32
from lorafleet.protocol.structured_spec import JsonPart

_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_OUTER = (
    frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}) | _NOTES
)
_OF_TEXT = frozenset({"type", "enum", "const", "minLength", "maxLength"}) | _NOTES


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """The text around parameters, as letters."""

    before_key: str
    after_key: str
    before_text: str = ""
    after_text: str | None = None  # Ends a text and cannot be in it. None: texts are JSON too.
    has_lines: bool = False  # A line break precedes a text, and another one follows it.
    after_json: str = ""
    more: str = ""  # Stands between two parameters.


def parameter_rules(rule: str, name: str, schema: dict[str, Any], syntax: ParameterSyntax, offer: Offer) -> str:
    """Returns the rules of one function's parameters.

    Adds the schemas of values to the offer's parts. Raises InvalidRequest for a schema that the format cannot express.
    """
    unknown = sorted(set(schema) - _OUTER)
    if unknown:
        raise _impossible(name, f"has {unknown[0]!r}")
    properties, required = parameters_of(schema), schema.get("required") or []
    if not isinstance(required, list):
        raise _impossible(name, "has a `required` that is no list")
    if not properties:
        if required:
            raise _impossible(name, "requires properties that it does not define")
        return f"{rule}:\n" if schema.get("additionalProperties") is False else _any(rule, syntax, offer)
    rules, places = list[str](), list[str]()
    for i, (key, part) in enumerate(properties.items()):
        own = f"{rule}_{i}"
        rules.append(offer.budget.text(_parameter(own, name, key, part, schema, syntax, offer)))
        places.append(own)
    needed = {key for key in required if isinstance(key, str)}
    rules.append(offer.budget.text(_sequence(rule, places, [key in needed for key in properties], syntax)))
    return "".join(rules)


def _sequence(rule: str, places: list[str], is_required: list[bool], syntax: ParameterSyntax) -> str:
    """Returns rules for the parameters in their order; `more` stands between two of them."""
    rules = list[str]()
    for i in range(len(places) + 1):
        for begun in (False, True):
            this = rule if (i, begun) == (0, False) else f"{rule}_from_{i}_{int(begun)}"
            if i == len(places):
                rules.append(f'{this}: ""\n')
                continue
            more = f"{free_text.text(syntax.more)} BLANKS? " if begun and syntax.more else ""
            taken = f"{more}{places[i]} BLANKS? {rule}_from_{i + 1}_1"
            skipped = "" if is_required[i] else f" | {rule}_from_{i + 1}_{int(begun)}"
            rules.append(f"{this}: {taken}{skipped}\n")
    return "".join(rules)


def _parameter(
    rule: str,
    name: str,
    key: str,
    schema: Any,
    root: Mapping[str, Any],
    syntax: ParameterSyntax,
    offer: Offer,
) -> str:
    offer.budget.value(schema, "tools")
    definitions = {place: root[place] for place in ("$defs", "definitions") if place in root}
    if isinstance(schema, dict) and "$ref" in schema:
        offer.budget.value(resolved(schema, root), "tools")  # Each parameter has a copy of what it refers to.
    head = _head(free_text.text(key), syntax, offer)
    if syntax.after_text is not None and is_text(schema, root):
        return _text(rule, head, _content(name, key, resolved(schema, root)), syntax.after_text, syntax, offer)
    inner = schema
    if isinstance(schema, dict):
        offer.budget.value(definitions, "tools")
        inner = schema | definitions
    return _json(rule, head, JsonPart(f"{rule}_json", inner, f"the parameter {key} of {name}"), syntax, offer)


def _head(key: str, syntax: ParameterSyntax, offer: Offer) -> str:
    before, after = (offer.spelled(letters) for letters in (syntax.before_key, syntax.after_key))
    return f"{before} {key} {after}"


def _json(rule: str, head: str, part: JsonPart, syntax: ParameterSyntax, offer: Offer) -> str:
    offer.parts.append(part)
    end = f"BLANKS? {offer.spelled(syntax.after_json)}" if syntax.after_json else ""
    return f"{rule}: {head} BLANKS? {part.rule} {end}\n"


def _text(rule: str, head: str, content: str, end: str, syntax: ParameterSyntax, offer: Offer) -> str:
    """Returns the rule of a text. `content` is a terminal for it, with the terminals that restrict it."""
    line = ' "\\n"' if syntax.has_lines else ""
    before = f"{offer.spelled(syntax.before_text)}{line}"
    own = rule.upper()
    content = f"({content} & {free_text.free([end])})"
    if end in offer.special:
        closed = free_text.marker(end, offer.special)
        return f"{rule}: {head} {before} {own} {closed}\n{own}: {content}{line}\n"
    return (
        f"{rule}: {head} {before} {rule}_end\n{rule}_end[lazy]: {own}\n{own}: {content}{line} {free_text.text(end)}\n"
    )


def _content(name: str, key: str, schema: Mapping[str, Any]) -> str:
    """Returns a terminal for the texts of a schema."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        if not isinstance(values, list) or not values:
            raise _impossible(name, f"has an `enum` for the text {key!r} that is no list of values")
        return f"({' | '.join(map(free_text.text, values))})"
    unknown = sorted(set(schema) - _OF_TEXT)
    if unknown:
        raise _impossible(name, f"has {unknown[0]!r} for the text {key!r}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", INT32)
    if not all(type(bound) is int and 0 <= bound <= INT32 for bound in (least, most)) or least > most:
        raise _impossible(name, f"has lengths for the text {key!r} that no text has")
    return f"/(?s:.{{{least},{most if 'maxLength' in schema else ''}}})/"


def _any(rule: str, syntax: ParameterSyntax, offer: Offer) -> str:
    """Returns rules for any parameters."""
    head = _head("/[A-Za-z_][A-Za-z0-9_]{0,63}/", syntax, offer)
    if syntax.after_text is None:
        one = _json(f"{rule}_one", head, JsonPart(f"{rule}_json", True, "a parameter"), syntax, offer)
    else:
        one = _text(f"{rule}_one", head, "ANY", syntax.after_text, syntax, offer)
    more = f"{free_text.text(syntax.more)} BLANKS? " if syntax.more else ""
    return f"{rule}: ({rule}_one BLANKS? ({more}{rule}_one BLANKS?)*)?\n{one}"


def _impossible(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The schema of the strict function {name!r} {why}, which the format of this model's calls cannot enforce. "
        "Leave that out, make the function not strict, or set `tool_choice` to required or to the function.",
        "tools",
    )

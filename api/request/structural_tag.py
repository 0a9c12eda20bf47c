"""Converts XGrammar's structural tags, as vLLM and SGLang accept them, to grammars.

The current form is a text of nested parts, {"format": …}. The older form is free text in which each of the "triggers"
begins one of the "structures". Only parts that need no lookahead are supported, so the end of free text must always be
marked: by a text that follows it, or by the end of the answer.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from lorafleet.api.request import free_text
from lorafleet.api.request.bounds import fault_of_json
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_JSON_TEXT_CHARS, MAX_TAG_TEXT_CHARS, MAX_TAGS, MAX_TRIGGERS, cut
from lorafleet.protocol.outside.text_budget import TextBudget
from lorafleet.protocol.structured_spec import JsonPart, StructuredOutputs

_SOME_PARTS = msgspec.Meta(min_length=1, max_length=MAX_TAGS)
_Letters = Annotated[str, msgspec.Meta(max_length=MAX_TAG_TEXT_CHARS)]
_Trigger = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TAG_TEXT_CHARS)]
_Triggers = Annotated[list[_Trigger], msgspec.Meta(min_length=1, max_length=MAX_TRIGGERS)]


class _Part(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


class _ConstString(_Part, tag="const_string"):
    value: _Letters


class _AnyText(_Part, tag="any_text"):
    pass


class _JsonSchema(_Part, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class _Tag(_Part, tag="tag"):
    begin: _Letters
    content: _Format
    end: _Letters


class _Sequence(_Part, tag="sequence"):
    elements: Annotated[list[_Format], _SOME_PARTS]


class _Or(_Part, tag="or"):
    elements: Annotated[list[_Format], _SOME_PARTS]


class _TriggeredTags(_Part, tag="triggered_tags"):
    """Free text in which each trigger begins a tag."""

    triggers: _Triggers
    tags: Annotated[list[_Tag], _SOME_PARTS]
    at_least_one: bool = False  # If true, it must begin with a tag.
    stop_after_first: bool = False


class _TagsWithSeparator(_Part, tag="tags_with_separator"):
    tags: Annotated[list[_Tag], _SOME_PARTS]
    separator: _Letters
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = _ConstString | _AnyText | _JsonSchema | _Tag | _Sequence | _Or | _TriggeredTags | _TagsWithSeparator


class _Nested(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: _Letters
    schema: dict[str, Any] | bool
    end: _Letters


class _Flat(msgspec.Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], _SOME_PARTS]
    triggers: _Triggers
    type: Literal["structural_tag"] = "structural_tag"


def structural_tag(given: object, param: str, special: Mapping[str, int]) -> StructuredOutputs:
    """Converts a structural tag, given as JSON text or parsed. `special` is as in free_text.marker().

    Raises InvalidRequest.
    """
    writer = _Writer(param, special)
    start = writer.part(_read(given, param), last=True)
    lark = "\n".join([f"start: {start}", *writer.lines, free_text.TERMINALS])
    return structured_spec.tagged(lark, writer.schemas, param)


def _read(given: object, param: str) -> _Format:
    try:
        if isinstance(given, str):
            given = _parsed(given, param)
        if not isinstance(given, dict) or "format" in given:
            return msgspec.convert(given, _Nested).format
        flat = msgspec.convert(given, _Flat)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"`{param}` must have either `format`, or both `triggers` (a list of strings) and `structures` (a list of "
            f"objects with `begin`, `schema` and `end`): {cut(str(error))}.",
            param,
        ) from None
    return _TriggeredTags(
        flat.triggers,
        [_Tag(structure.begin, _JsonSchema(structure.schema), structure.end) for structure in flat.structures],
    )


def _parsed(text: str, param: str) -> object:
    """Parses a tag that is given as text. It has the bounds of one that is given as an object."""
    given = json.loads(text)
    fault = fault_of_json(given, MAX_JSON_TEXT_CHARS)
    if fault is not None:
        raise InvalidRequest(f"`{param}` {fault}.", param)
    return given


class _Writer:
    """Collects the rules of a grammar: in `schemas` those of the JSON parts, and in `lines` all others.

    Everything is taken from one budget while it is made. Each trigger is written once, as a terminal that the rules of
    the other triggers name.
    """

    def __init__(self, param: str, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.schemas: list[JsonPart] = []
        self._param = param
        self._special = special
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._tokens = re.compile(f"({names})") if names else None
        self._budget = TextBudget(param)
        self._count = 0

    def part(self, part: _Format, *, last: bool) -> str:
        """Returns the expression of a part. `last` means that nothing follows it."""
        match part:
            case _ConstString():
                return self._text(part.value)
            case _JsonSchema():
                number = len(self.schemas)
                self._budget.value(part.json_schema, self._param)
                self.schemas.append(JsonPart(f"json_{number}", part.json_schema, f"schema {number}"))
                return f"json_{number}"
            case _Tag():
                return f"{self._text(part.begin)} {self._behind_begin(part, last=last)}"
            case _Sequence():
                lasts = [False] * (len(part.elements) - 1) + [last]
                in_order = zip(part.elements, lasts, strict=True)
                return f"({' '.join(self.part(element, last=is_last) for element, is_last in in_order)})"
            case _Or():
                return f"({' | '.join(self.part(element, last=last) for element in part.elements)})"
            case _TagsWithSeparator():
                return self._separated(part)
            case _AnyText() if last:
                return "ANY"
            case _TriggeredTags() if last:
                return self._triggered(part)
        raise self._refused(
            "any_text and triggered_tags must come last; any_text may also be the whole content of a tag"
        )

    def _behind_begin(self, tag: _Tag, *, last: bool) -> str:
        if isinstance(tag.content, _AnyText) and tag.end:
            return self._up_to(tag.end)
        return f"{self.part(tag.content, last=last and not tag.end)} {self._text(tag.end)}"

    def _separated(self, part: _TagsWithSeparator) -> str:
        any_tag = self._budget.text(f"({' | '.join(self.part(tag, last=False) for tag in part.tags)})")
        tags = any_tag if part.stop_after_first else f"{any_tag} ({self._text(part.separator)} {any_tag})*"
        return f"({tags})" if part.at_least_one else f"({tags})?"

    def _triggered(self, part: _TriggeredTags) -> str:
        self._check_triggers(part)
        within = {trigger: self._line(f"ANY {free_text.text(trigger)} ANY") for trigger in part.triggers}
        up_to = {
            trigger: self._up_to(trigger, " | ".join(name for other, name in within.items() if other != trigger))
            for trigger in part.triggers
        }
        first, later = [], []
        for tag in part.tags:
            trigger = next(trigger for trigger in part.triggers if tag.begin.startswith(trigger))
            behind, rest = self._name(), tag.begin.removeprefix(trigger)
            self._add(f"{behind}: {self._text(rest)} {self._behind_begin(tag, last=False)}")
            first.append(f"{self._text(trigger)} {behind}")
            later.append(f"{up_to[trigger]} {behind}")
        text = self._line(free_text.free((), but=" | ".join(within.values())))
        begin = f"({' | '.join(first if part.at_least_one else later)})"
        if part.stop_after_first:
            return begin if part.at_least_one else f"({begin} | {text})"
        more = f"({' | '.join(later)})* {text}"
        return f"({begin} {more})" if part.at_least_one else f"({more})"

    def _check_triggers(self, part: _TriggeredTags) -> None:
        triggers, begins = part.triggers, [tag.begin for tag in part.tags]
        for trigger, other in itertools.permutations(triggers, 2):
            if trigger in other:
                raise self._refused(
                    f"the trigger {other!r:.80} contains the trigger {trigger!r:.80}; leave one of them out"
                )
        for trigger in triggers:
            if not any(begin.startswith(trigger) for begin in begins):
                raise self._refused(f"no tag begins with the trigger {trigger!r:.80}; leave it out")
        for begin in begins:
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise self._refused(
                    f"{begin!r:.80} does not begin with any of the `triggers`; add one that it begins with"
                )

    def _up_to(self, letters: str, but: str = "") -> str:
        if letters not in self._special and any(name in letters for name in self._special):
            raise self._refused(f"free text must end with either text or a special token, but {letters!r:.80} has both")
        rule = self._name()
        self._add(free_text.up_to(rule, letters, self._special, but=but))
        return rule

    def _line(self, terminal: str) -> str:
        """Adds the terminal, and returns its name."""
        name = self._name().upper()
        self._add(f"{name}: {terminal}")
        return name

    def _add(self, line: str) -> None:
        self.lines.append(self._budget.text(line))

    def _text(self, letters: str) -> str:
        """Returns the expression of a text, with the special tokens that it contains."""
        pieces = self._tokens.split(letters) if self._tokens else [letters]
        return self._budget.text(" ".join(free_text.marker(piece, self._special) for piece in pieces if piece))

    def _name(self) -> str:
        self._count += 1
        return f"rule_{self._count}"

    def _refused(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._param}`: {why}.", self._param)

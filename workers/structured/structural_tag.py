"""vLLM's and SGLang's structural tags: free text, in which a trigger must go on as one of the tags that begin with it,
each JSON of a schema between two texts: {"triggers": […], "structures": [{"begin": …, "schema": …, "end": …}, …]}."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.structured import free_text, spec
from lorafleet.workers.structured.spec import JsonPart, StructuredOutputs

MAX_TRIGGERS = 64  # each is looked for in all text


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Tag(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


def structural_tag(given: object, param: str, special: Mapping[str, int]) -> StructuredOutputs:
    """given: parsed, or as text. special: as free_text.marker() takes it. Raises InvalidRequest."""
    tag = _read(given, param)
    rules = {trigger: f"up_to_{i}" for i, trigger in enumerate(tag.triggers)}
    lines = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tag.structures)))})* TEXT"]
    for i, one in enumerate(tag.structures):
        trigger = next((trigger for trigger in tag.triggers if one.begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequest(f"`{param}`: {one.begin!r:.80} begins with none of the `triggers`; add one.", param)
        behind = one.begin.removeprefix(trigger)
        begin = f"{rules[trigger]} {free_text.text(behind)}" if behind else rules[trigger]
        end = free_text.marker(one.end, special) if one.end else ""
        lines.append(f"tag_{i}: {begin} json_{i} {end}")
    for trigger, rule in rules.items():
        lines.append(free_text.up_to(rule, trigger, special, [one for one in rules if one != trigger]))
    lines += [f"TEXT: {free_text.free(tag.triggers)}", free_text.TERMINALS]
    parts = [JsonPart(f"json_{i}", one.schema, f"`structures[{i}].schema`") for i, one in enumerate(tag.structures)]
    return spec.tagged("\n".join(lines), parts, param)


def _read(given: object, param: str) -> _Tag:
    try:
        tag = msgspec.convert(json.loads(given) if isinstance(given, str) else given, _Tag)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"`{param}` must have `triggers`, a list of texts, and `structures`, a list of objects with `begin`, "
            f"`schema` and `end`: {error}.",
            param,
        ) from None
    if not tag.structures or not tag.triggers or not all(tag.triggers) or len(tag.triggers) > MAX_TRIGGERS:
        raise InvalidRequest(
            f"`{param}` needs at least one structure, and 1 to {MAX_TRIGGERS} triggers that are not empty.", param
        )
    for one, other in itertools.permutations(tag.triggers, 2):
        if one in other:
            raise InvalidRequest(
                f"`{param}.triggers` has {one!r:.80}, which {other!r:.80} contains; leave one of them out.", param
            )
    for trigger in tag.triggers:
        if not any(one.begin.startswith(trigger) for one in tag.structures):
            raise InvalidRequest(
                f"`{param}.triggers` has {trigger!r:.80}, which no structure begins with; leave it out.", param
            )
    return tag

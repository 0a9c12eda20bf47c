"""Decides which lines of the traffic each model is trained on, and which are held out to measure its draft."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.strict_json import shown
from lorafleet.tools.comparison_runner import BASE
from lorafleet.tools.drafts.draft_traffic import TrafficLine

HELD_OUT_EVERY = 10  # Without lines of their own for it, one of this many different prompts is held out.
MAX_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class TrafficSplit:
    """The lines of one model. No prompt is in both lists."""

    train: list[TrafficLine]
    held_out: list[TrafficLine]


def split_traffic(
    name: str,
    lines: Sequence[TrafficLine],
    held_out: Sequence[TrafficLine] | None,
    *,
    base_names: Collection[str],
    is_only_model: bool,
) -> TrafficSplit:
    """Returns the lines of one model.

    Args:
        name: BASE, or the adapter's name.
        held_out: Lines to measure on. None: some of the others are used.
        base_names: Names of the base in the traffic.
        is_only_model: Whether this is the only model that is trained. Only then can an answer without a model's name
            be its own.

    Raises InvalidRequest if the model has no lines to train on, or none to measure on.
    """
    names = base_names if name == BASE else (name,)
    own = _lines_of(names, lines)
    if not is_only_model and (line := next((line for line in own if line.is_answered and not line.model), None)):
        raise InvalidRequest(
            f"{line.place} has an answer and no model, and drafts of several models are trained. Add the model."
        )
    if held_out is None:
        prompts = [*dict.fromkeys(map(_prompt_key, own))]
        kept = set(prompts[::HELD_OUT_EVERY]) if len(prompts) > 1 else set()
        measured = [line for line in own if _prompt_key(line) in kept]
    else:
        measured = _lines_of(names, held_out)
        kept = set(map(_prompt_key, measured))
    train = [line for line in own if _prompt_key(line) not in kept]
    if not train or not measured:
        seen = ", ".join(sorted({shown(line.model) for line in lines if line.model})[:MAX_SHOWN_NAMES]) or "none"
        raise InvalidRequest(
            f"{name} has {len(train)} prompts to train on and {len(measured)} to measure on; it needs at least one of "
            f"each. Give more prompts, or lines without a model. Models in the file: {seen}."
        )
    return TrafficSplit(train, [*{_prompt_key(line): line for line in measured}.values()])


def _lines_of(names: Collection[str], lines: Sequence[TrafficLine]) -> list[TrafficLine]:
    return [line for line in lines if line.model is None or line.model in names]


def _prompt_key(line: TrafficLine) -> str:
    return json.dumps([line.prompt, line.messages, line.prompt_ids])

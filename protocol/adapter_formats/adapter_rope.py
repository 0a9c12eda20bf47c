"""Reads an adapter's own rope scaling and context length, as LongLoRA trains them, from its files.

adapter_config.json may have `context_length`, `rope_scaling` or `rope_parameters`, and lorafleet.json beside it too. An
adapter with a rope scaling was trained on a base whose config.json had that scaling in place of its own. Nothing here
knows the base: the number of positions that it was trained for is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import read_json_object, shown

DEFAULTS_NAME = "lorafleet.json"
ROPE_KEYS = ("context_length", "rope_parameters", "rope_scaling")
_SCALED = ("factor", "rope_theta")
_BY_DISTANCE = ("original_max_position_embeddings", *_SCALED)
# The fields of each scaling. These are the scalings whose angles do not depend on the sequence's length.
SCALINGS = {
    "default": ("rope_theta",),
    "linear": _SCALED,
    "llama3": ("high_freq_factor", "low_freq_factor", *_BY_DISTANCE),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", *_BY_DISTANCE),
}
MAX_CONTEXT_LENGTH = 1 << 26
MAX_NUMBER = 1e9  # of a rope scaling's numbers

_KINDS = ("rope_type", "type")  # transformers 4 wrote `type`


@dataclass(frozen=True, slots=True)
class AdapterRope:
    """The rope scaling and the context length that an adapter's files state. At least one of them is not None."""

    scaling: Mapping[str, str | float | bool] | None = None  # Has the keys of rope_parameters, always with rope_type.
    context_length: int | None = None

    def scaling_for(self, positions: int) -> Mapping[str, str | float | bool] | None:
        """Returns the scaling on a base that was trained for so many positions. None: the base's own.

        A context length alone means linear scaling by the smallest whole factor that suffices, as in LongLoRA and vLLM.
        """
        if self.scaling is not None or self.context_length is None or self.context_length <= positions:
            return self.scaling
        return {"rope_type": "linear", "factor": float(math.ceil(self.context_length / positions))}

    def context_limit(self, positions: int) -> int:
        """Returns the most tokens that a prompt and its answer may have together."""
        if self.context_length is not None:
            return self.context_length
        scaling = self.scaling or {}
        kind, factor = scaling["rope_type"], float(scaling.get("factor", 1.0))
        if kind == "linear":
            return int(positions * factor)
        trained = float(scaling.get("original_max_position_embeddings", positions))
        return positions if kind == "default" else max(positions, int(trained * factor))


def read_adapter_rope(config: Mapping[str, object], defaults: bytes | None) -> AdapterRope | None:
    """Returns what an adapter's files say of its rope, or None if they say nothing.

    Raises AdapterMalformed or AdapterUnsupported.

    Args:
        config: adapter_config.json.
        defaults: lorafleet.json, or None if there is none.
    """
    files: dict[str, Mapping[str, object]] = {CONFIG_NAME: config}
    if defaults is not None:
        files[DEFAULTS_NAME] = read_json_object(defaults, DEFAULTS_NAME)
    given = [
        (f"{file}: {key}", key, found[key]) for file, found in files.items() for key in ROPE_KEYS if found.get(key)
    ]
    scalings = [(where, _scaling(value, where)) for where, key, value in given if key != "context_length"]
    lengths = [(where, _context_length(value, where)) for where, key, value in given if key == "context_length"]
    for (where, one), (elsewhere, other) in (*pairwise(scalings), *pairwise(lengths)):
        if one != other:
            raise AdapterMalformed(f"{where} and {elsewhere} contradict each other. Remove one of them.")
    if not given:
        return None
    return AdapterRope(scalings[0][1] if scalings else None, lengths[0][1] if lengths else None)


def _context_length(value: object, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_CONTEXT_LENGTH:
        raise AdapterMalformed(f"{where} is {shown(value)}; it must be an integer from 1 to {MAX_CONTEXT_LENGTH}.")
    return value


def _scaling(value: object, where: str) -> dict[str, str | float | bool]:
    if not isinstance(value, dict):
        raise AdapterMalformed(
            f'{where} is {shown(value)}; it must be an object such as {{"rope_type": "linear", "factor": 4.0}}.'
        )
    kinds = {value[key] for key in _KINDS if isinstance(value.get(key), str)}
    if len(kinds) != 1 or not kinds <= set(SCALINGS):
        raise AdapterUnsupported(
            f"{where} has the rope_type {shown(value.get('rope_type', value.get('type')))}; an adapter's own rope "
            f"scaling must be one of {', '.join(SCALINGS)}, the same for all layers."
        )
    [kind] = kinds
    scaling: dict[str, str | float | bool] = {"rope_type": kind}
    for key, number in value.items():
        if key in _KINDS or number is None:
            continue
        if key not in SCALINGS[kind]:
            raise AdapterUnsupported(f"{where} has {shown(key)}, which rope_type {kind!r} does not have.")
        if key == "truncate" and isinstance(number, bool):
            scaling[key] = number
        elif type(number) not in (int, float) or not 0 < number <= MAX_NUMBER:
            raise AdapterMalformed(
                f"{where} has {key}={shown(number)}; it must be a number over 0, at most {MAX_NUMBER:g}."
            )
        else:
            scaling[key] = float(number)
    if kind != "default" and scaling.get("factor", 0.0) < 1.0:  # type: ignore[operator]  # a number, as checked above
        raise AdapterMalformed(f"{where} has factor={shown(value.get('factor'))}; {kind} needs a factor of at least 1.")
    return scaling

"""Finds the architecture that a config.json means: the class that generates text, as transformers chooses it."""

from __future__ import annotations

from typing import Any


def architecture_name(raw: dict[str, Any], known: frozenset[str]) -> str | None:
    """Returns the class that transformers generates text with, or None if config.json does not tell.

    A single architecture is meant as it is. Several, none, or the class of the decoder without its head, such as
    "MistralModel", mean transformers' class for the model_type. Classes with another purpose are not replaced.

    Args:
        known: Architectures that need no look into transformers, whose import takes seconds.
    """
    given = raw.get("architectures")
    names = [] if given is None else given if isinstance(given, list) else [given]
    if len(names) == 1 and isinstance(names[0], str) and (names[0] in known or not _is_decoder(names[0])):
        return names[0]
    by_type = _classes_of(raw.get("model_type"))
    return by_type[0] if by_type and all(name in by_type for name in names) else None


def _is_decoder(name: str) -> bool:
    """Returns whether the class is named as one without a head: "MistralModel", but not "GPT2LMHeadModel"."""
    return name.endswith("Model") and not name.endswith("HeadModel")


def _classes_of(model_type: object) -> tuple[str, ...]:
    """Returns transformers' class that generates text, and then those that may stand for the same checkpoint."""
    from transformers.models.auto import modeling_auto as auto

    if not isinstance(model_type, str):
        return ()
    mappings = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found = (names.get(model_type) for names in (*mappings, auto.MODEL_MAPPING_NAMES))
    classes = tuple(name for name in found if isinstance(name, str))
    return classes if any(model_type in names for names in mappings) else ()

"""Finds the language model in a checkpoint that has a part for pictures too, such as Gemma 3 or Qwen2.5-VL.

The other part may be for sound as well. Only texts are served, so its tensors are neither read nor held. transformers 4
and 5 differ in their names.
"""

from __future__ import annotations

import re
from typing import Any

# These stand before a module's own name, such as "layers.0.mlp.down_proj".
PREFIXES = ("model.language_model.", "language_model.model.")

_TEXT = re.compile("|".join(map(re.escape, PREFIXES)))
_PICTURES = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the language model's config from `raw`, the whole config.json."""
    return raw | dict(raw.get("text_config") or {}) | {"architectures": raw["architectures"]}


def wrapper_ties(raw: dict[str, Any], default: bool | None) -> bool:
    """Returns whether the class of the whole model calls head and embedding tied.

    The flag of text_config counts for the language model alone, so it decides only where the whole config.json has none
    and the family has no `default`. transformers 5 writes Mistral 3's flags differently.
    """
    text = raw.get("text_config") or {}
    given = next(
        (
            flag
            for flag in (raw.get("tie_word_embeddings"), default, text.get("tie_word_embeddings"))
            if flag is not None
        ),
        False,
    )
    return bool(given)


def any_ties(raw: dict[str, Any]) -> bool:
    """Returns whether the whole config.json or its text_config calls head and embedding tied."""
    return any(part.get("tie_word_embeddings") for part in (raw, raw.get("text_config") or {}))


def untied_flags(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of the whole config.json that say that head and embedding are two tensors."""
    text = raw.get("text_config")
    flag = {"tie_word_embeddings": False}
    return flag | {"text_config": text | flag} if isinstance(text, dict) else flag


def text_name(name: str) -> str:
    """Returns the tensor's name in a checkpoint of the language model alone."""
    return _TEXT.sub("model.", name.removeprefix("language_model.") if "lm_head" in name else name, count=1)


def spellings(name: str) -> list[str]:
    """Returns the module's name in the file, then those that other versions of transformers have in its place.

    The lists of names in config.json are not converted when a library saves a checkpoint, so they may have either.
    """
    own = text_name(name)
    if own == name:
        return [name]
    return [name, *(own.replace("model.", prefix, 1) for prefix in PREFIXES if not name.startswith(prefix))]


def is_of_pictures(name: str) -> bool:
    return _PICTURES.match(name) is not None

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


def ties_contradict(raw: dict[str, Any]) -> bool:
    """Returns whether the whole config.json and its text_config differ in tie_word_embeddings, as transformers 5 writes
    Mistral 3's. The file's tensors show then whether there is a head."""
    flags = {
        part["tie_word_embeddings"] for part in (raw, raw.get("text_config") or {}) if "tie_word_embeddings" in part
    }
    return len(flags) > 1


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

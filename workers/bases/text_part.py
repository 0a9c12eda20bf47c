"""Finds the language model in a checkpoint that has a part for pictures too, as Gemma 3's have from 4B on.

Only texts are served, so tensors for pictures are neither read nor held. transformers 4 and 5 differ in their names.
"""

from __future__ import annotations

import re
from typing import Any

LANGUAGE_MODEL_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
# These stand before a module's own name, such as "layers.0.mlp.down_proj".
PREFIXES = ("model.language_model.", "language_model.model.")

_TEXT = re.compile("|".join(map(re.escape, PREFIXES)))
_PICTURES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the language model's config from `raw`, the whole config.json."""
    return raw | dict(raw.get("text_config") or {}) | {"architectures": raw["architectures"]}


def text_name(name: str) -> str:
    """Returns the tensor's name in a checkpoint of the language model alone."""
    return _TEXT.sub("model.", name.removeprefix("language_model.") if "lm_head" in name else name, count=1)


def is_of_pictures(name: str) -> bool:
    return _PICTURES.match(name) is not None

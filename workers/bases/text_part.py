"""The language model within a checkpoint that is of pictures too, as Gemma 3's are from 4B on. Texts alone are served:
what belongs to pictures is neither read nor held.

transformers 4 and 5 call the same tensors differently.
"""

from __future__ import annotations

import re
from typing import Any

LANGUAGE_MODEL_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
# Before a module's own name, "layers.0.mlp.down_proj".
PREFIXES = ("model.language_model.", "language_model.model.")

_TEXT = re.compile("|".join(map(re.escape, PREFIXES)))
_PICTURES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """raw: the whole config.json."""
    return raw | dict(raw.get("text_config") or {}) | {"architectures": raw["architectures"]}


def text_name(name: str) -> str:
    """A tensor's, as a checkpoint of the language model alone has it."""
    return _TEXT.sub("model.", name.removeprefix("language_model.") if "lm_head" in name else name, count=1)


def is_of_pictures(name: str) -> bool:
    return _PICTURES.match(name) is not None

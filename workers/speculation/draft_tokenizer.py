"""Checks that a draft model has the base's tokens, so that a number means the same text to both."""

from __future__ import annotations

from pathlib import Path

from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.errors import ConfigError

TOKENIZER_NAME = "tokenizer.json"


def check_same_tokenizer(base: Path, draft: Path, base_size: int, draft_size: int) -> None:
    """Raises ConfigError if the vocabularies in two checkpoints' folders differ.

    Special tokens may differ, since they have places of their own. Where a folder has no tokenizer.json, the sizes
    must be the same.

    Args:
        base_size: Size of the base's vocabulary.
        draft_size: Size of the draft model's vocabulary.
    """
    paths = [folder / TOKENIZER_NAME for folder in (base, draft)]
    if all(path.is_file() for path in paths):
        if paths[0].read_bytes() == paths[1].read_bytes() or _vocabulary(paths[0]) == _vocabulary(paths[1]):
            return
        raise ConfigError(
            f"speculative_config: the draft model {str(draft)!r} has another vocabulary than the base, so its tokens "
            "mean other texts. Give a draft model with the base's tokenizer.",
            "speculative_config",
        )
    if base_size != draft_size:
        raise ConfigError(
            f"speculative_config: the draft model {str(draft)!r} has {draft_size} tokens and the base has {base_size}. "
            f"Give a draft model with the base's tokenizer, and {TOKENIZER_NAME} in both folders.",
            "speculative_config",
        )


def _vocabulary(path: Path) -> object:
    """Returns the tokens of the tokenizer's model, and how it joins them."""
    model = read_json(path).get("model")
    return {name: model.get(name) for name in ("vocab", "merges")} if isinstance(model, dict) else model

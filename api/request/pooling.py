"""Reads the default pooling of a model's embeddings from its folder, in the format of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import Pooling

FILE = Path("1_Pooling", "config.json")
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


def read_pooling(model_path: str | Path) -> Pooling:
    """Returns the model's pooling, or "last" if it names none, as vLLM does for decoders. Raises ConfigError."""
    path = Path(model_path) / FILE
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return "last"
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    asked = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in _MODES:
        raise ConfigError(
            f"{path} asks for {', '.join(asked) or 'no pooling'}; this server supports {' or '.join(_MODES)}. Start "
            "the server with --pooling last, mean or cls to override it."
        )
    return _MODES[asked[0]]

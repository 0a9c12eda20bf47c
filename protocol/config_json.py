"""Reads config.json and similar files, and the numbers in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lorafleet.protocol.errors import ConfigError

# Numbers that JSON does not have, by their names in transformers' objects: {"__float__": "Infinity"}.
ENCODED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
MAX_JSON_BYTES = 128 << 20  # The index of a checkpoint with 200,000 tensors has some 25 MB.


def read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has more than {MAX_JSON_BYTES:,} bytes. Download the checkpoint again.", "model")
        value = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; give a local Hugging Face checkpoint.", "model") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {e}", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object.", "model")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config that transformers may have written: as read_json(), with encoded numbers as numbers."""
    found = read_json(path)
    return {key: _decoded(value) for key, value in found.items()}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and isinstance(value["__float__"], str):
        return ENCODED_FLOATS.get(value["__float__"], value)
    return {key: _decoded(item) for key, item in value.items()}


def integer(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json has {key}={value!r}; it must be a positive integer.", "model")
    return value


def num_layers(raw: dict[str, Any]) -> int:
    return integer(raw, "num_hidden_layers", 32)

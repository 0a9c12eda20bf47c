"""Reads `dynamic` of a quantization_config, with which GPTQModel quantizes some modules in other ways.

`dynamic` has patterns of module paths. The first that matches a linear decides: "-:" means that it is plain, "+:" or no
prefix changes its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.quantization_settings import NamePatterns
from lorafleet.workers.bases.text_part import spellings


def changed_settings(name: str, config: Mapping[str, Any], patterns: NamePatterns) -> Mapping[str, Any]:
    """Returns the settings that `dynamic` changes for a linear that is stored quantized.

    Raises ConfigError if it says that the linear is plain.
    """
    for pattern, changes in (config.get("dynamic") or {}).items():
        prefix, bare = (pattern[:2], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("", pattern)
        if not any(patterns.match("dynamic", bare, spelled) for spelled in spellings(name)):
            continue
        if prefix == "-:":
            raise ConfigError(
                f"{name} is stored quantized, but quantization_config's dynamic says by {pattern!r} that it is not. "
                "Correct config.json.",
                "model",
            )
        own: Mapping[str, Any] = changes
        return own
    return {}

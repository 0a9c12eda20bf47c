"""Reads what a quantization_config says about single linears: `dynamic` of GPTQModel, and `extra_config` of AutoRound.

- `dynamic` has patterns of module paths. The first that matches the beginning of a path decides: "-:" means that the
  linear is plain, "+:" or no prefix changes its settings.
- `extra_config` has module paths and patterns. The linear's own path decides, or else the first pattern that is found
  in the path. With 16 bits, the linear is plain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.quantization_settings import NamePatterns
from lorafleet.workers.bases.text_part import spellings

Settings = Mapping[str, Any]
PATH = re.compile(r"[\w.]+")  # a module path, which AutoRound makes of every pattern that it can


class ChangedSettings:
    """The settings that differ from those of the quantization_config for some linears."""

    def __init__(self, config: Settings) -> None:
        self._patterns = NamePatterns()
        self._dynamic: Mapping[str, Settings] = config.get("dynamic") or {}
        self._extra: Mapping[str, Settings] = config.get("extra_config") or {}
        self._extra_patterns = [key for key, own in self._extra.items() if own and PATH.fullmatch(key) is None]

    def of(self, name: str) -> Settings:
        """Returns those of a linear that is stored quantized. Raises ConfigError if they say that it is plain."""
        return {**self._of_dynamic(name), **self._of_extra(name)}

    def _of_dynamic(self, name: str) -> Settings:
        for pattern, changes in self._dynamic.items():
            prefix, bare = (pattern[:2], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("", pattern)
            if not any(self._patterns.match("dynamic", bare, spelled) for spelled in spellings(name)):
                continue
            if prefix == "-:":
                raise _plain(name, "dynamic", pattern)
            return changes
        return {}

    def _of_extra(self, name: str) -> Settings:
        names = spellings(name)
        key = next((spelled for spelled in names if spelled in self._extra), None)
        if key is None:
            is_found = self._patterns.search
            key = next(
                (key for key in self._extra_patterns if any(is_found("extra_config", key, one) for one in names)), None
            )
        if key is None:
            return {}
        if is_plain(self._extra[key]):
            raise _plain(name, "extra_config", key)
        return self._extra[key]


def is_plain(settings: Settings) -> bool:
    """Returns whether an entry of extra_config says that its linears are plain."""
    bits = settings.get("bits")
    return isinstance(bits, int) and bits >= 16


def _plain(name: str, field: str, pattern: str) -> ConfigError:
    return ConfigError(
        f"{name} is stored quantized, but quantization_config's {field} says by {pattern!r} that it is not. Correct "
        "config.json.",
        "model",
    )

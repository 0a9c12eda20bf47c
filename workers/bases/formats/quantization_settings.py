"""Checks the quantization_config of a checkpoint before a format reads it, and matches its patterns with names.

Lists, objects and texts have their types then, so that formats check values alone. A pattern from a file can be made to
run for years in `re`. Here all patterns of a checkpoint share a time budget.
"""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import regex  # type: ignore[import-untyped, unused-ignore]  # its stubs are a package of their own

from lorafleet.protocol.errors import ConfigError

MAX_PATTERN_CHARS = 16_384
MATCH_S = 20.0  # processor time for all patterns and names of a checkpoint; those of 45,000 experts take about 1 s


class _Group(msgspec.Struct):
    """One of the config_groups of compressed-tensors and ModelOpt."""

    targets: list[str] | None = None
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _Settings(msgspec.Struct):
    """The keys of all formats that are lists, objects or texts."""

    quant_method: str | None = None
    config_groups: dict[str, _Group] | None = None
    dynamic: dict[str, dict[str, Any]] | None = None  # of GPTQModel
    kv_cache_scheme: dict[str, Any] | str | None = None  # ModelOpt writes a name for what it has no object for.
    ignore: list[str] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    exclude_modules: list[str] | None = None
    quantized_layers: dict[str, dict[str, Any]] | None = None  # of ModelOpt
    quantization: _Settings | None = None  # ModelOpt's hf_quant_config.json has its settings there.


def check_settings(config: object) -> None:
    """Raises ConfigError if a key of quantization_config has another type than every library gives it."""
    try:
        msgspec.convert(config, _Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"quantization_config cannot be read: {error}. Correct config.json, or download it again.", "model"
        ) from None


class NamePatterns:
    """The regular expressions of one checkpoint's quantization_config."""

    def __init__(self, budget_s: float = MATCH_S) -> None:
        self._left_s = budget_s
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, field: str, pattern: str, name: str) -> bool:
        """Returns whether the pattern matches the beginning of the name, as re.match() does.

        `field` is the key of quantization_config that has the pattern. Raises ConfigError for a pattern that is no
        regular expression or too long, and if the patterns take too long.
        """
        if pattern not in self._compiled:
            self._compiled[pattern] = _compiled(field, pattern)
        start = time.thread_time()
        try:
            if self._left_s > 0:
                return self._compiled[pattern].match(name, timeout=self._left_s) is not None
        except TimeoutError:
            pass
        finally:
            self._left_s -= time.thread_time() - start
        raise ConfigError(
            f"quantization_config: {field} has the pattern {pattern[:200]!r}. The patterns take more than {MATCH_S} s "
            "to match against the linears' names (catastrophic backtracking). List the names instead.",
            "model",
        )


def _compiled(field: str, pattern: str) -> regex.Pattern[str]:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ConfigError(
            f"quantization_config: {field} has a pattern of {len(pattern):,} characters; at most {MAX_PATTERN_CHARS:,} "
            "are allowed. List the names instead.",
            "model",
        )
    try:
        re.compile(pattern)  # as the libraries do; `regex` accepts more
        return regex.compile(pattern, cache_pattern=False)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"quantization_config: {field} has the pattern {pattern[:200]!r}, which is no regular expression: {error}.",
            "model",
        ) from None

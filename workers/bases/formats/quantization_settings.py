"""Checks the quantization_config of a checkpoint before a format reads it, and matches its patterns with names.

Lists, objects and texts have their types then, so that formats check values alone. A pattern from a file can be made to
run for years in `re`. Here all patterns of a checkpoint share a time budget, and one of memory: `regex` copies what is
repeated, so a short pattern can take more memory than there is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import regex  # type: ignore[import-untyped, unused-ignore]  # its stubs are a package of their own

from lorafleet.protocol.errors import ConfigError

MAX_PATTERN_CHARS = 16_384
MATCH_S = 20.0  # processor time for all patterns and names of a checkpoint; those of 45,000 experts take about 1 s
MOST_NODES = 1 << 22  # of all compiled patterns of a checkpoint, with some 270 bytes each
GROWING = re.compile(r"\)\+|\{(\d*)(?:,\d*)?\}")  # `regex` copies a group for `+`, and anything for a count
VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")  # a flag with which these may have spaces and comments inside


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
    packing_format: str | None = None  # of AutoRound
    config_groups: dict[str, _Group] | None = None
    dynamic: dict[str, dict[str, Any]] | None = None  # of GPTQModel
    extra_config: dict[str, dict[str, Any]] | None = None  # of AutoRound
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
        self._left_nodes = MOST_NODES
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, field: str, pattern: str, name: str) -> bool:
        """Returns whether the pattern matches the beginning of the name, as re.match() does.

        `field` is the key of quantization_config that has the pattern. Raises ConfigError for a pattern that is no
        regular expression or too long, and if the patterns take too long or too much memory.
        """
        return self._is_found(field, pattern, lambda one, left_s: one.match(name, timeout=left_s))

    def search(self, field: str, pattern: str, name: str) -> bool:
        """Returns whether the pattern matches anywhere in the name, as re.search() does. Otherwise it is as match()."""
        return self._is_found(field, pattern, lambda one, left_s: one.search(name, timeout=left_s))

    def _is_found(self, field: str, pattern: str, look: Callable[[regex.Pattern[str], float], object]) -> bool:
        if pattern not in self._compiled:
            _check_syntax(field, pattern)
            self._left_nodes -= _most_nodes(pattern)
            if self._left_nodes < 0:
                raise ConfigError(
                    f"quantization_config: {field} has the pattern {pattern[:200]!r}. The patterns take too much "
                    "memory, since they have large or nested repetitions or the flag x. List the names instead.",
                    "model",
                )
            self._compiled[pattern] = _compiled(field, pattern)
        start = time.thread_time()
        try:
            if self._left_s > 0:
                return look(self._compiled[pattern], self._left_s) is not None
        except TimeoutError:  # by another clock than this thread's
            self._left_s = 0
        finally:
            self._left_s -= time.thread_time() - start
        raise ConfigError(
            f"quantization_config: {field} has the pattern {pattern[:200]!r}. The patterns take more than {MATCH_S} s "
            "to match against the linears' names (catastrophic backtracking). List the names instead.",
            "model",
        )


def _most_nodes(pattern: str) -> int:
    """Returns a bound on the nodes of the compiled pattern, as if all that is repeated lay within each other."""
    if VERBOSE.search(pattern) is not None:
        return MOST_NODES + 1
    nodes = 2 * len(pattern)
    for least in GROWING.findall(pattern):
        nodes *= 1 + int(least or 1)
    return nodes


def _check_syntax(field: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ConfigError(
            f"quantization_config: {field} has a pattern of {len(pattern):,} characters; at most {MAX_PATTERN_CHARS:,} "
            "are allowed. List the names instead.",
            "model",
        )
    try:
        re.compile(pattern)  # as the libraries do; `regex` accepts more
    except (re.error, RecursionError, OverflowError, ValueError) as error:  # ValueError: a count of 4,301 digits
        raise _no_expression(field, pattern, error) from None


def _compiled(field: str, pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, cache_pattern=False)
    except (regex.error, RecursionError) as error:
        raise _no_expression(field, pattern, error) from None


def _no_expression(field: str, pattern: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"quantization_config: {field} has the pattern {pattern[:200]!r}, which is no regular expression: {error}.",
        "model",
    )

"""Matches module names by the rules that PEFT uses, with patterns that strangers wrote.

PEFT hands the strings of adapter_config.json to `re`, which can be made to run for years while it holds the GIL. Here a
plain name never meets a regex engine, and a real regular expression is held to a subset on which `re` and the `regex`
package agree, and runs in the latter under a deadline, without the GIL.
"""

from __future__ import annotations

import re
import time
from functools import cached_property

import regex

from lorafleet.workers.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.lora.strict_json import shown

MAX_PATTERN_CHARS = 32_768  # a list of every module of a large model, joined by "|", still fits
TOTAL_MATCH_S = 0.25  # for all patterns and modules of one adapter

_PLAIN = re.compile(r"[A-Za-z0-9_.]*")
_NAME = re.compile(r"[A-Za-z0-9_]*")
# What module-name patterns are made of. Left out: flags (ranges under (?i) take seconds to compile), \x and \u escapes,
# nested sets, and `{` that opens no repeat (the `regex` package reads fuzzy matching there).
_SUBSET = re.compile(
    r"""(?:
        \\[dDwWsSbBAZ0-9] | \\[^A-Za-z0-9]
        | \(\?(?::|=|!|<=|<!|>|P<[A-Za-z_][A-Za-z0-9_]*>) | \((?!\?)
        | \{[0-9]*,?[0-9]*\}
        | \[\^?\]?(?:[^\[\]\\&|~] | \\[^A-Za-z] | \\[dDwWsS])*\]
        | [^\\(\[{]
    )*+""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


class Deadline:
    """The time that one adapter's patterns may take together."""

    def __init__(self, total_s: float = TOTAL_MATCH_S) -> None:
        self._end = time.monotonic() + total_s

    @property
    def left_s(self) -> float:
        return max(self._end - time.monotonic(), 1e-3)


class Pattern:
    """One regular expression from an adapter's config. `field` is where it stood, for messages."""

    def __init__(self, text: str, field: str) -> None:
        self.text = text
        self.field = field
        if len(text) > MAX_PATTERN_CHARS:
            raise AdapterMalformed(f"{field} has a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS} fit.")
        if not text.isascii() or _SUBSET.fullmatch(text) is None:
            raise AdapterUnsupported(
                f"{field} has the pattern {shown(text)}, which uses more than the regular expressions of module names "
                f"that are understood here (no flags, no \\x or \\u escapes, no nested sets). List the modules instead."
            )

    @cached_property
    def is_plain(self) -> bool:
        return _PLAIN.fullmatch(self.text) is not None

    def fullmatch(self, module: str, deadline: Deadline) -> bool:
        if self.is_plain:
            return _equal_but_for_dots(self.text, module)
        return self._search(self._whole, module, deadline) is not None

    def matches_ending(self, module: str, deadline: Deadline) -> bool:
        """PEFT's rule for rank_pattern and alpha_pattern: re.match(r"(.*\\.)?(key)$", module)."""
        if self.is_plain:
            start = len(module) - len(self.text)
            return (start == 0 or (start > 0 and module[start - 1] == ".")) and _equal_but_for_dots(
                self.text, module[start:]
            )
        return self._search(self._ending, module, deadline) is not None

    def layer_index(self, module: str, deadline: Deadline) -> int | None:
        """PEFT's rule for layers_pattern: the first number that follows it as a path segment."""
        match = self._search(self._layer, module, deadline)
        return None if match is None else int(match["idx"])

    @cached_property
    def _whole(self) -> regex.Pattern[str]:
        return self._compile(rf"(?:{self.text})\Z")

    @cached_property
    def _ending(self) -> regex.Pattern[str]:
        return self._compile(rf"(.*\.)?({self.text})$")

    @cached_property
    def _layer(self) -> regex.Pattern[str]:
        return self._compile(rf"(?:^|.*?\.){self.text}\.(?P<idx>\d+)\.")

    def _compile(self, text: str) -> regex.Pattern[str]:
        try:
            re.compile(self.text)  # PEFT would fail on it too; `regex` alone accepts more
            return regex.compile(text, cache_pattern=False)
        except (re.error, regex.error, RecursionError, OverflowError):
            raise AdapterMalformed(f"{self.field} has {shown(self.text)}, which is no regular expression.") from None

    def _search(self, compiled: regex.Pattern[str], module: str, deadline: Deadline) -> regex.Match[str] | None:
        try:
            return compiled.match(module, timeout=deadline.left_s, concurrent=True)
        except (TimeoutError, MemoryError):
            raise AdapterMalformed(
                f"{self.field} has {shown(self.text)}, which takes more than {TOTAL_MATCH_S} s to match against the "
                f"module names (catastrophic backtracking). List the modules instead."
            ) from None


def ends_with_name(module: str, names: tuple[str, ...]) -> bool:
    """PEFT's rule for lists of names: the module itself, or its last path segments."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _equal_but_for_dots(pattern: str, module: str) -> bool:
    """A plain pattern is a regular expression too: its dots match any character."""
    if pattern == module:
        return True
    if len(pattern) != len(module):
        return False
    return all(p in (".", m) for p, m in zip(pattern, module, strict=True))

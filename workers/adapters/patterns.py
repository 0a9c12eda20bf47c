"""Matches module names by the rules that PEFT uses, with patterns from untrusted files.

PEFT passes the strings of adapter_config.json to `re`, which can be made to run for years while it holds the GIL.
Here a plain name never reaches a regex engine. A real regular expression must belong to a subset on which `re` and
the `regex` package agree. It runs in `regex`, within a time budget and without the GIL.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import regex  # type: ignore[import-untyped, unused-ignore]  # its stubs are a package of their own

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown

MAX_PATTERN_CHARS = 16_384  # a list of every module of a large model, joined by "|", still fits
TOTAL_MATCH_S = 0.25  # for all patterns and modules of one adapter, including compilation

_PLAIN = re.compile(r"[A-Za-z0-9_.]*")
# The syntax that patterns of module names may use. It excludes flags (ranges under (?i) take seconds to compile),
# \x and \u escapes, nested sets, and `{` that opens no repeat (the `regex` package reads fuzzy matching there).
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


class Budget:
    """The processor time that one adapter's patterns may take together. A busy machine does not use it up faster."""

    def __init__(self, total_s: float = TOTAL_MATCH_S) -> None:
        self.left_s = total_s

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Subtracts the processor time that this thread uses within the block."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.left_s -= time.thread_time() - start


class Pattern:
    """One regular expression from an adapter's config. `field` is the key that holds it, for messages."""

    def __init__(self, text: str, field: str) -> None:
        self.text = text
        self.field = field
        self.is_plain = _PLAIN.fullmatch(text) is not None
        self._kept: tuple[str, regex.Pattern[str]] | None = None
        if len(text) > MAX_PATTERN_CHARS:
            raise AdapterMalformed(
                f"{field} has a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS} are allowed."
            )
        if not text.isascii() or "--" in text or _SUBSET.fullmatch(text) is None:
            raise AdapterUnsupported(
                f"{field} has the pattern {shown(text)}, which is outside the supported subset of regular expressions "
                "(no flags, no \\x or \\u escapes, no nested sets). List the modules instead."
            )

    def fullmatch(self, module: str, budget: Budget) -> bool:
        """Applies PEFT's rule for target_modules and exclude_modules given as one string."""
        if self.is_plain:
            return _equal_but_for_dots(self.text, module)
        return self._match(rf"(?:{self.text})\Z", module, budget) is not None

    def matches_ending(self, module: str, budget: Budget) -> bool:
        """Applies PEFT's rule for rank_pattern and alpha_pattern: re.match(r"(.*\\.)?(key)$", module)."""
        if not self.is_plain:
            return self._match(rf"(.*\.)?({self.text})$", module, budget) is not None
        start = len(module) - len(self.text)
        if start < 0 or (start > 0 and module[start - 1] != "."):
            return False
        return _equal_but_for_dots(self.text, module[start:])

    def layer_index(self, module: str, budget: Budget) -> int | None:
        """Returns the layer number by PEFT's rule for layers_pattern, or None.

        It is the first number that follows the pattern as a path segment.
        """
        match = self._match(rf"(?:^|.*?\.){self.text}\.(?P<idx>\d+)\.", module, budget)
        return None if match is None else int(match["idx"])

    def _match(self, text: str, module: str, budget: Budget) -> regex.Match[str] | None:
        while budget.left_s > 0:
            # The package's timeout counts the time of other threads too, so it only says when to check the budget.
            with contextlib.suppress(TimeoutError), budget.spend():
                try:
                    return self._compiled(text).match(module, timeout=budget.left_s, concurrent=True)
                except MemoryError:
                    break
        raise AdapterMalformed(
            f"{self.field} has {shown(self.text)}, which takes more than {TOTAL_MATCH_S} s to match against the "
            f"module names (catastrophic backtracking). List the modules instead."
        )

    def _compiled(self, text: str) -> regex.Pattern[str]:
        """Compiles `text`, which is self.text within one of PEFT's rules. A pattern is used in only one of them."""
        if self._kept is None or self._kept[0] != text:
            try:
                re.compile(self.text)  # PEFT would fail on it too; `regex` accepts more
                self._kept = (text, regex.compile(text, cache_pattern=False))
            except (re.error, regex.error, RecursionError, OverflowError):
                message = f"{self.field} has {shown(self.text)}, which is not a valid regular expression."
                raise AdapterMalformed(message) from None
        return self._kept[1]


class NameList:
    """A list of names that match the module itself or its last path segments, as PEFT's lists do."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._endings = tuple(f".{name}" for name in self._names)

    def has(self, module: str) -> bool:
        return module in self._names

    def has_ending(self, module: str) -> bool:
        return module in self._names or module.endswith(self._endings)


def _equal_but_for_dots(pattern: str, module: str) -> bool:
    """Returns whether the plain pattern matches. It is a regular expression too, so its dots match any character."""
    if pattern == module:
        return True
    if len(pattern) != len(module):
        return False
    return all(p in (".", m) for p, m in zip(pattern, module, strict=True))

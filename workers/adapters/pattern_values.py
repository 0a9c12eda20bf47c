"""Looks up the values that rank_pattern and alpha_pattern give to modules, by all names that a module has had.

An entry counts under the names of the class that the adapter was trained with, and under those into which PEFT converts
them. One that would count only under the names of another class, or that names nothing at all, is refused: PEFT would
ignore it without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.patterns import TOTAL_MATCH_S, Budget, Pattern
from lorafleet.workers.adapters.spellings import Spelled

V = TypeVar("V", int, float)

_FEW = 16  # names that differ only in dots and underscores, in a table that people write
# An entry with such a word is for a part that is left out, whose modules are not known here.
_OTHER_PARTS = re.compile(r"(?!.*language).*(?:vision|visual|audio|projector|connector|merger)", re.DOTALL)


class PatternValues(Generic[V]):
    """The entries of one table. An entry's place in the file decides: the first match wins."""

    def __init__(self, field: str, entries: Sequence[tuple[Pattern, V]], default: V, budget: Budget) -> None:
        self._field, self._budget = field, budget
        self._entries: Sequence[tuple[Pattern, V]] = entries
        self._default: V = default
        self._plain: dict[str, list[int]] = {}
        for i, (pattern, _) in enumerate(entries):
            if pattern.is_plain:
                self._plain.setdefault(_folded(pattern.text), []).append(i)
        self._expressions = [i for i, (pattern, _) in enumerate(entries) if not pattern.is_plain]

    def of(
        self, modules: Mapping[str, Spelled], others: Callable[[], Iterable[str]], left_out: Iterable[str]
    ) -> dict[str, V]:
        """Returns the value of each module. Raises AdapterMalformed for an entry that no module's name matches.

        Args:
            modules: the names of the modules that the adapter changes.
            others: returns the names of the base's other modules, which an entry may name without effect.
            left_out: the names of modules outside of the decoder that the file has tensors for.
        """
        values = dict.fromkeys(modules, self._default)
        if not self._entries:
            return values
        decided: dict[str, int] = {}
        for module, spelled in yielding_gil(modules.items()):
            found = self._first(spelled.own)
            if found is not None:
                decided[module], values[module] = found, self._entries[found][1]
        unused = self._unmatched(
            sorted(set(range(len(self._entries))) - set(decided.values())),
            (name for spelled in modules.values() for name in spelled.own),
        )
        hits = list(self._hits(unused, {module: spelled.served for module, spelled in modules.items()}))
        for i, module in hits:
            if module not in decided:
                decided[module], values[module] = i, self._entries[i][1]
        converted = {i for i, _ in hits}
        unused = [i for i in unused if i not in converted]
        if not unused:
            return values
        self._check_foreign(unused, modules, values)
        known = [*others(), *left_out, *(name for spelled in modules.values() for name in spelled.foreign)]
        for i in self._unmatched(unused, known):
            text = self._entries[i][0].text
            if _OTHER_PARTS.match(text) is None:
                raise AdapterMalformed(
                    f"{self._field} names {shown(text)}, which matches none of the {len(modules)} modules that the "
                    "weights file has tensors for, nor another module of the base. PEFT would ignore it. Correct the "
                    "name, or remove the entry."
                )
        return values

    def _check_foreign(self, unused: Iterable[int], modules: Mapping[str, Spelled], values: Mapping[str, V]) -> None:
        """Raises AdapterMalformed for an entry that would change a module's value if the class were another one."""
        for i, module in self._hits(unused, {module: spelled.others for module, spelled in modules.items()}):
            pattern, value = self._entries[i]
            if value != values[module]:
                raise AdapterMalformed(
                    f"{self._field} names {shown(pattern.text)}, which matches none of the {len(modules)} modules that "
                    f"the weights file has tensors for by their names there, such as {shown(modules[module].name)}. It "
                    "would match by the names of another class of transformers. Write it for these names, or remove "
                    "the entry."
                )

    def _first(self, names: Sequence[str]) -> int | None:
        """Returns the first entry that matches the first of the names that any matches."""
        for name in names:
            found = min(self._plain_matches(name), default=len(self._entries))
            for i in self._expressions:
                if i >= found:
                    break
                if self._entries[i][0].matches_ending(name, self._budget):
                    found = i
            if found < len(self._entries):
                return found
        return None

    def _plain_matches(self, name: str) -> list[int]:
        alike = [i for ending in _endings(name) for i in self._plain.get(_folded(ending), ())]
        if len(alike) <= _FEW:
            return [i for i in alike if self._entries[i][0].matches_ending(name, self._budget)]
        with self._budget.spend():
            found = [i for i in alike if self._entries[i][0].matches_ending(name, self._budget)]
        if self._budget.left_s <= 0:
            raise AdapterMalformed(
                f"{self._field} has {len(alike)} entries such as {shown(self._entries[alike[0]][0].text)}, which "
                f"differ only in dots and underscores and take more than {TOTAL_MATCH_S} s to match. List each module "
                "once."
            )
        return found

    def _hits(self, entries: Iterable[int], names: Mapping[str, Sequence[str]]) -> Iterator[tuple[int, str]]:
        """Yields each of the entries with each module of which it matches a name, module by module, in file order."""
        wanted = set(entries)
        expressions = [i for i in self._expressions if i in wanted]
        for module, own in yielding_gil(names.items()):
            found = {i for name in own for i in self._plain_matches(name) if i in wanted}
            found.update(
                i for i in expressions if any(self._entries[i][0].matches_ending(name, self._budget) for name in own)
            )
            yield from ((i, module) for i in sorted(found))

    def _unmatched(self, entries: list[int], names: Iterable[str]) -> list[int]:
        """Returns those of the entries that match none of the names."""
        left = dict.fromkeys(entries)
        for name in yielding_gil(names):
            if not left:
                break
            for i in self._plain_matches(name):
                left.pop(i, None)
            for i in [i for i in self._expressions if i in left]:
                if self._entries[i][0].matches_ending(name, self._budget):
                    del left[i]
        return list(left)


def _endings(name: str) -> Iterator[str]:
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name
    yield ""


def _folded(text: str) -> str:
    """Returns the text with one sign for all that a dot of a pattern stands for in names of modules."""
    return text.replace("_", ".")

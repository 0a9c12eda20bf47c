"""The common parts of the formats' grammars, for requests in which the arguments of calls must match schemas.

The grammar of a format is in the same file as its parser, because the two must agree: text that the parser would take
for a call can be written only as a call that matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lorafleet.api.request import free_text
from lorafleet.protocol import structured_spec
from lorafleet.protocol.outside.text_budget import TextBudget
from lorafleet.protocol.structured_spec import JsonPart, StructuredOutputs

OBJECT = r"/[ \t\n\r]*\{(?s:.*)/"  # Text that begins like a JSON object.
_RULE = re.compile(r"\barguments_[0-9]+\b")


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that an answer may call, and the form of an answer without calls."""

    arguments: Mapping[str, dict[str, Any]]  # The schema of each function's arguments, by the function's name.
    special: Mapping[str, int]  # Ids of special tokens by their text, for free_text.marker().
    parallel: bool = True  # Whether there may be more than one call.
    text: StructuredOutputs | None = None  # Format of an answer without calls. None: free text, also beside calls.
    parts: list[JsonPart] = field(default_factory=list)  # Schemas that a format's grammar adds as rules.
    budget: TextBudget = field(default_factory=lambda: TextBudget("tools"))  # Counts the rules while they are made.
    _spelled: dict[str, str] = field(default_factory=dict)

    def spelled(self, letters: str) -> str:
        """Returns letters of the format as texts and special tokens. Each text is searched for tokens only once."""
        found = self._spelled.get(letters)
        if found is None:
            found = self._spelled[letters] = free_text.spelled(letters, self.special)
        return found

    @property
    def rules(self) -> dict[str, str]:
        """The grammar rules of the functions' arguments, by the functions' names."""
        return {name: f"arguments_{i}" for i, name in enumerate(self.arguments)}

    def call(self, key: str, rule: str = "call") -> str:
        """Returns the rule of a call: an object with a name and, under `key`, the arguments."""
        written = []
        for name, arguments in self.rules.items():
            head = ["{", '"name"', ":", json.dumps(name, ensure_ascii=False), ",", json.dumps(key), ":"]
            written.append(" BLANKS? ".join([*map(free_text.text, head), arguments, free_text.text("}")]))
        return f"{rule}: {' | '.join(written)}\n"

    def answer(self, marker: str, *, bare: str = "") -> str:
        """Returns the rule `start`, with the rule `calls` after markers.

        If `bare` is given, calls may also begin the answer without a marker. Then all text that matches the regular
        expression `bare` is a call, and further calls need no marker of their own.
        """
        if self.text is not None:
            head = f"BLANKS? {free_text.marker(marker, self.special)}"
            calls = f"({head})? calls" if bare else self._repeated(f"{head} calls")
            return f"start: formatted | {calls}\n"
        calls = "up_to? calls" if bare else self._repeated("up_to calls")
        behind = "TEXT" if self.parallel and not bare else ""
        return (
            f"start: TEXT | {calls} {behind}\nTEXT: {free_text.free([marker], but=bare)}\n"
            f"{free_text.up_to('up_to', marker, self.special, but=bare)}"
        )

    def _repeated(self, calls: str) -> str:
        return f"({calls})+" if self.parallel else calls

    def constraint(self, grammar: str) -> StructuredOutputs:
        """Returns the constraint for the grammar of one format, which uses the rules here."""
        used = set(_RULE.findall(grammar))
        parts = [
            JsonPart(rule, self.arguments[name], f"the parameters of {name}")
            for name, rule in self.rules.items()
            if rule in used
        ]
        parts += self.parts
        if self.text is not None:
            schema = json.loads(self.text.source) if self.text.kind == "json_schema" else {"type": "object"}
            parts.append(JsonPart("formatted", schema, f"`{self.text.param}`", self.text.any_whitespace))
        return structured_spec.tagged(grammar + free_text.TERMINALS, parts, "tools")

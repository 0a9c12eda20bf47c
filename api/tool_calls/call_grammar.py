"""The common parts of the formats' grammars, for requests in which the arguments of calls must match schemas.

The grammar of a format is in the same file as its parser, because the two must agree: text that the parser would take
for a call can be written only as a call that matches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorafleet.api.request import free_text
from lorafleet.protocol import structured_spec
from lorafleet.protocol.structured_spec import JsonPart, StructuredOutputs

_OBJECT = r"/[ \t\n\r]*\{(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that an answer may call, and the form of an answer without calls."""

    arguments: Mapping[str, dict[str, Any]]  # The schema of each function's arguments, by the function's name.
    special: Mapping[str, int]  # Ids of special tokens by their text, for free_text.marker().
    parallel: bool = True  # Whether there may be more than one call.
    text: StructuredOutputs | None = None  # Format of an answer without calls. None: free text, also beside calls.

    @property
    def rules(self) -> dict[str, str]:
        """The grammar rules of the functions' arguments, by the functions' names."""
        return {name: f"arguments_{i}" for i, name in enumerate(self.arguments)}

    def call(self, key: str) -> str:
        """Returns the rule `call`: an object with a name and, under `key`, the arguments."""
        written = []
        for name, rule in self.rules.items():
            head = ["{", '"name"', ":", json.dumps(name, ensure_ascii=False), ",", json.dumps(key), ":"]
            written.append(" BLANKS? ".join([*map(free_text.text, head), rule, free_text.text("}")]))
        return f"call: {' | '.join(written)}\n"

    def answer(self, marker: str, *, bare: bool = False) -> str:
        """Returns the rule `start`, with the rule `calls` after markers.

        If `bare`, calls may also begin the answer without a marker. Then all text that begins like an object is a
        call, and further calls need no marker of their own.
        """
        if self.text is not None:
            head = f"BLANKS? {free_text.marker(marker, self.special)}"
            calls = f"({head})? calls" if bare else self._repeated(f"{head} calls")
            return f"start: formatted | {calls}\n"
        calls = "up_to? calls" if bare else self._repeated("up_to calls")
        behind = "TEXT" if self.parallel and not bare else ""
        but = _OBJECT if bare else ""
        return (
            f"start: TEXT | {calls} {behind}\nTEXT: {free_text.free([marker], but=but)}\n"
            f"{free_text.up_to('up_to', marker, self.special, but=but)}"
        )

    def _repeated(self, calls: str) -> str:
        return f"({calls})+" if self.parallel else calls

    def constraint(self, grammar: str) -> StructuredOutputs:
        """Returns the constraint for the grammar of one format, which uses the rules here."""
        parts = [JsonPart(rule, self.arguments[name], f"the parameters of {name}") for name, rule in self.rules.items()]
        if self.text is not None:
            schema = json.loads(self.text.source) if self.text.kind == "json_schema" else {"type": "object"}
            parts.append(JsonPart("formatted", schema, f"`{self.text.param}`", self.text.any_whitespace))
        return structured_spec.tagged(grammar + free_text.TERMINALS, parts, "tools")

"""What each format's grammar is made of, where the model may call functions whose arguments must match.

A format's grammar stands beside its parser, for the two must agree: what the parser would take for a call cannot be
written but as a call that matches.
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
    """arguments: the schema of each function's, by its name. special: as free_text.marker() takes it. parallel: there
    may be more calls than one. text: what an answer without calls must be; None: free text, also beside calls."""

    arguments: Mapping[str, dict[str, Any]]
    special: Mapping[str, int]
    parallel: bool = True
    text: StructuredOutputs | None = None

    @property
    def rules(self) -> dict[str, str]:
        """Of each function's arguments, by its name."""
        return {name: f"arguments_{i}" for i, name in enumerate(self.arguments)}

    def call(self, key: str) -> str:
        """The rule `call`: an object of a name and, behind the key, arguments."""
        written = []
        for name, rule in self.rules.items():
            head = ["{", '"name"', ":", json.dumps(name, ensure_ascii=False), ",", json.dumps(key), ":"]
            written.append(" BLANKS? ".join([*map(free_text.text, head), rule, free_text.text("}")]))
        return f"call: {' | '.join(written)}\n"

    def answer(self, marker: str, *, bare: bool = False) -> str:
        """The rule `start`, of rules `calls` behind markers. bare: calls may also begin the answer, without a marker:
        then all that begins as an object does is one, and other calls need no marker of their own."""
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
        """grammar: of the rules here, that of one format."""
        parts = [JsonPart(rule, self.arguments[name], f"the parameters of {name}") for name, rule in self.rules.items()]
        if self.text is not None:
            schema = json.loads(self.text.source) if self.text.kind == "json_schema" else {"type": "object"}
            parts.append(JsonPart("formatted", schema, f"`{self.text.param}`", self.text.any_whitespace))
        return structured_spec.tagged(grammar + free_text.TERMINALS, parts, "tools")

"""Writes Lark rules for answers that are free text until a marker begins a part with a defined format.

The parser of such an answer finds a marker by its letters. Therefore free text never contains these letters, even if
the vocabulary has a special token for the marker and no model would spell it. Free text contains no other special
token either.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

# JSON's blanks. Longer runs of them have no meaning, and small models do not find their way out of them.
TERMINALS = "ANY: /(?s:.*)/\nBLANKS: /[ \\t\\n\\r]{1,64}/\n"


def text(letters: str) -> str:
    """Returns a terminal for exactly these letters."""
    return json.dumps(letters)  # llguidance's Lark writes texts as JSON does.


def marker(letters: str, special: Mapping[str, int]) -> str:
    """Returns the marker as a special token if it is one, else as text. `special` maps special tokens' texts to IDs."""
    return f"<[{special[letters]}]>" if letters in special else text(letters)


def spelled(letters: str, special: Mapping[str, int]) -> str:
    """Returns the letters as a sequence of texts and of the special tokens among them."""
    parts, rest = list[str](), letters
    while rest:
        found = [(rest.find(name), -len(name), name) for name in special if name and name in rest]
        begin, _, name = min(found, default=(len(rest), 0, ""))
        parts += [text(rest[:begin])] if begin else []
        parts += [marker(name, special)] if name else []
        rest = rest[begin + len(name) :]
    return " ".join(parts)


def free(markers: Collection[str], *, but: str = "") -> str:
    """Returns a terminal for any text that contains none of the markers and does not match the terminal `but`."""
    refused = [f"(ANY {text(letters)} ANY)" for letters in markers] + ([f"({but})"] if but else [])
    return "ANY" + "".join(f" & ~{terminal}" for terminal in refused)


def up_to(rule: str, letters: str, special: Mapping[str, int], *, but: str = "") -> str:
    """Returns lines that define the rule: free text up to and including the first `letters`.

    The free text does not match the terminal `but`.
    """
    terminal = rule.upper()
    if letters in special:
        return f"{rule}: {terminal} {marker(letters, special)}\n{terminal}: {free([letters], but=but)}\n"
    # A lazy rule ends at the end of the first `letters`, whatever may follow.
    return f"{rule}[lazy]: {terminal}\n{terminal}: (ANY {text(letters)}) & {free((), but=but)}\n"

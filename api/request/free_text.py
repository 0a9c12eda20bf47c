"""Pieces of Lark for answers that are free text until a marker begins something that has a form.

Who reads such an answer finds a marker by its letters. So free text never has those, not even where the vocabulary has
a special token for the marker and nobody would spell it; nor does it have any other special token.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

# Blanks are JSON's own; more of them in a row say nothing, and small models get lost in them.
TERMINALS = "ANY: /(?s:.*)/\nBLANKS: /[ \\t\\n\\r]{1,64}/\n"


def text(letters: str) -> str:
    """A terminal: these letters."""
    return json.dumps(letters)  # as llguidance's Lark spells texts


def marker(letters: str, special: Mapping[str, int]) -> str:
    """special: ids of the vocabulary's special tokens, by what they are written as."""
    return f"<[{special[letters]}]>" if letters in special else text(letters)


def free(markers: Collection[str], *, but: str = "") -> str:
    """A terminal: any text that has none of the markers and does not match the terminal `but`."""
    refused = [f"(ANY {text(one)} ANY)" for one in markers] + ([f"({but})"] if but else [])
    return "ANY" + "".join(f" & ~{one}" for one in refused)


def up_to(rule: str, letters: str, special: Mapping[str, int], others: Collection[str] = (), *, but: str = "") -> str:
    """Lines that define the rule: free text that ends with the first marker in it; `others` are markers too."""
    terminal = rule.upper()
    if letters in special:
        return f"{rule}: {terminal} {marker(letters, special)}\n{terminal}: {free([letters, *others], but=but)}\n"
    # Lazy: it ends where the letters first do, whatever may follow.
    return f"{rule}[lazy]: {terminal}\n{terminal}: (ANY {text(letters)}) & {free(others, but=but)}\n"

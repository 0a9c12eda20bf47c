"""Reads tiktoken.model, whose lines are tokens in base64 with their ranks.

The file does not hold the regular expression that splits texts; the code of the model's tokenizer class does. That
code is never run here, so only the classes in a table are supported.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from tokenizers import Tokenizer

from lorafleet.api.text.ranked_tokens import build_ranked
from lorafleet.protocol.errors import ConfigError, UnsupportedModel

_NUM_RESERVED = 256  # Special tokens of Kimi's models after the ranked ones.
_ENGLISH_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Patterns by the class that tokenizer_config.json names in its auto_map.
PATTERNS = {"tokenization_kimi.TikTokenTokenizer": _KIMI}


def read_tiktoken(raw: bytes, class_name: str | None, names: Mapping[int, str]) -> Tokenizer:
    """Returns the tokenizer of a file.

    Args:
        class_name: The class that reads the file, from tokenizer_config.json.
        names: Special tokens by id, from tokenizer_config.json.

    Raises ConfigError for a damaged file, and UnsupportedModel for a class that is not known.
    """
    pattern = PATTERNS.get(class_name or "")
    if pattern is None:
        raise UnsupportedModel(
            f"the tokenizer is a tiktoken file for the class {class_name!r}, which is code that is never run; known "
            f"classes: {', '.join(PATTERNS)}. Convert the tokenizer to tokenizer.json."
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"line {number} of the tiktoken file is not a token in base64 and its rank.") from None
    special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + _NUM_RESERVED)}
    return build_ranked(ranks, pattern, special)

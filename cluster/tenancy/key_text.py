"""Defines the format of a key: `lf-`, 40 random letters and digits, and six more that are their checksum. With the
checksum, a mistyped key is recognized without a lookup, and scanners for leaked secrets can find keys.

A key has 238 random bits, so one round of sha256 hides it for good. A slow password hash would only slow requests.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib

from lorafleet.protocol.errors import InvalidRequest

PREFIX = "lf-"
NUM_RANDOM = 40

_ALPHABET = string.digits + string.ascii_letters
_NUM_CHECKED = 6  # 62 ** 6 > 2 ** 32
_KEY = re.compile(rf"{PREFIX}([0-9A-Za-z]{{{NUM_RANDOM}}})([0-9A-Za-z]{{{_NUM_CHECKED}}})")


def make_key() -> str:
    text = "".join(secrets.choice(_ALPHABET) for _ in range(NUM_RANDOM))
    return PREFIX + text + _checksum(text)


def check_key(key: str) -> None:
    """Raises InvalidRequest for text that make_key() cannot have made. The message never shows the text."""
    match = _KEY.fullmatch(key)
    if match is None or _checksum(match[1]) != match[2]:
        raise InvalidRequest(
            f"This is not a lorafleet key: a key is {PREFIX} followed by {NUM_RANDOM + _NUM_CHECKED} letters and "
            f"digits, the last {_NUM_CHECKED} of them a checksum. Copy it again, or create one with "
            "`lorafleet keys create`."
        )


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _checksum(text: str) -> str:
    number, digits = zlib.crc32(text.encode()), ""
    for _ in range(_NUM_CHECKED):
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits

"""Packs the text of reasoning into the field `encrypted_content` of /v1/responses.

Clients that store no responses return this field and may drop the text itself. The text is encoded and not encrypted,
since the same answer shows it to the same client.
"""

from __future__ import annotations

import base64
import binascii

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_TEXT_CHARS

_PREFIX = "lorafleet-1."  # Distinguishes it from what other servers have encrypted.
# Up to four bytes for each character, and four characters for each three bytes.
MAX_PACKED_CHARS = len(_PREFIX) + 4 * -(-4 * MAX_TEXT_CHARS // 3)


def packed(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unpacked(given: object, where: str) -> str:
    """Returns the text of a field `where`. Raises InvalidRequest if this server has not written the field."""
    try:
        if not isinstance(given, str) or len(given) > MAX_PACKED_CHARS or not given.startswith(_PREFIX):
            raise ValueError
        encoded = given.removeprefix(_PREFIX)
        text = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest(
            f"`{where}` was not written by this server, which cannot read reasoning that another one has encrypted; "
            "remove the item.",
            where,
        ) from None
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"`{where}` has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed.", where)
    return text

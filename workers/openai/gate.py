"""Says whom a key belongs to and whether it opens what is asked for: 401 for no key or a wrong one, 403 for a key that
does not open it."""

from __future__ import annotations

import hashlib
import hmac

from lorafleet.workers.errors import Forbidden, Unauthorized
from lorafleet.workers.openai.caller import ANONYMOUS, Caller, Needed

ADMIN_KEY_ID = "admin-key"
_ADMIN = Caller(None, ADMIN_KEY_ID, frozenset(("infer", "admin", "metrics")))


class Gate:
    """admin_key: the operator's, which opens everything; None: nobody administers."""

    def __init__(self, admin_key: str | None = None) -> None:
        self._admin_digest = None if admin_key is None else _digest(admin_key)

    def caller(self, key: str | None, needed: Needed) -> Caller:
        if needed == "open":
            return ANONYMOUS
        if key is not None and self._admin_digest is not None and hmac.compare_digest(_digest(key), self._admin_digest):
            return _ADMIN
        if needed != "admin":
            return ANONYMOUS
        if self._admin_digest is None:
            raise Forbidden(
                "Administration is off: this server was started without an admin key. Start it with --admin-key, or "
                "with LORAFLEET_ADMIN_KEY in its environment."
            )
        if key is None:
            raise Unauthorized("You did not provide the admin key. Send it as `Authorization: Bearer KEY`.")
        raise Unauthorized(
            "Incorrect admin key provided. Send the server's --admin-key as `Authorization: Bearer KEY`."
        )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

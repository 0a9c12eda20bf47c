"""Finds the caller that a key belongs to, and checks that the key opens what the request needs.

A missing or wrong key gives 401, and a key without the scope gives 403. cluster/tenancy/key_ring.py provides the keys.
Without keys, everyone may infer, and only the holder of the admin key may administer.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lorafleet.api.access.caller import ANONYMOUS, Caller, Needed
from lorafleet.protocol.errors import Forbidden, Unauthorized

# Its mark is not made of the key, so that what the operator stores stays the operator's when the key is changed.
_ADMIN = Caller(None, "admin-key", frozenset(("infer", "admin", "metrics")), key_mark="operator")


@dataclass(frozen=True, slots=True)
class KnownKey:
    caller: Caller
    expires_s: float | None = None  # Seconds since 1970; None: never.


class Gate:
    """Authenticates the callers of a server.

    Args:
        admin_key: The operator's key, which opens everything; None if there is none.
        keys: Returns the valid keys by the sha256 of each, in another mapping once they have changed; None if the server
            runs without keys.
    """

    def __init__(
        self,
        admin_key: str | None = None,
        keys: Callable[[], Mapping[str, KnownKey]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._indexed: Mapping[str, KnownKey] = {}  # The keys that _by_mark has.
        self._by_mark: Mapping[str, KnownKey] = {}
        self.set_admin_key(admin_key)

    def set_admin_key(self, admin_key: str | None) -> None:
        """Makes this the operator's key from the next request on."""
        self._admin_digest = None if admin_key is None else _digest(admin_key)

    @property
    def has_keys(self) -> bool:
        """Whether callers are identified by API keys."""
        return self._keys is not None

    def caller(self, key: str | None, needed: Needed) -> Caller:
        """Returns the caller that sent `key`, which is None if no key was sent. Raises Unauthorized or Forbidden."""
        if needed == "open":
            return ANONYMOUS
        digest = None if key is None else _digest(key)
        if digest is not None and self._admin_digest is not None and hmac.compare_digest(digest, self._admin_digest):
            return _ADMIN
        if self._keys is None:
            return self._without_keys(key, needed)
        known = self._known(digest)
        wanted = "admin" if needed == "loading" else needed
        if wanted not in known.caller.scopes:
            raise Forbidden(
                f"The API key {known.caller.key_id!r} has the scopes {', '.join(sorted(known.caller.scopes))}; this "
                f"request needs the scope {wanted}. Use a key that has it."
            )
        return known.caller

    def caller_with(self, key_mark: str) -> Caller | None:
        """Returns the caller whose key has this mark, or None if the key may no longer send inference requests: it was
        revoked, has expired, or has lost the scope infer. "" is the caller without a key, whom only a server without
        keys lets in."""
        if key_mark == _ADMIN.key_mark:
            return None if self._admin_digest is None else _ADMIN
        if self._keys is None:
            return None if key_mark else ANONYMOUS
        keys = self._keys()
        if keys is not self._indexed:
            self._indexed, self._by_mark = keys, {known.caller.key_mark: known for known in keys.values()}
        known = self._by_mark.get(key_mark)
        is_valid = known is not None and (known.expires_s is None or known.expires_s > self._clock())
        return known.caller if known is not None and is_valid and "infer" in known.caller.scopes else None

    def _known(self, digest: str | None) -> KnownKey:
        """Looks up a key by its digest, because the time of such a lookup reveals nothing about the key."""
        assert self._keys is not None
        if digest is None:
            raise Unauthorized(
                "You did not provide an API key. Send it as `Authorization: Bearer KEY`, usually by setting your "
                "client's api_key."
            )
        known = self._keys().get(digest)
        if known is None:
            raise Unauthorized("Incorrect API key provided: this server has no such key, or it was revoked.")
        if known.expires_s is not None and known.expires_s <= self._clock():
            raise Unauthorized(f"The API key {known.caller.key_id!r} has expired. Ask for a new one.")
        return known

    def _without_keys(self, key: str | None, needed: Needed) -> Caller:
        if needed != "admin":
            return ANONYMOUS
        if self._admin_digest is None:
            raise Forbidden(
                "Administration is off: this server was started without an admin key. Start it with --admin-key or "
                "LORAFLEET_ADMIN_KEY in its environment, or with --api-keys and a key with the scope admin."
            )
        if key is None:
            raise Unauthorized("You did not provide the admin key. Send it as `Authorization: Bearer KEY`.")
        raise Unauthorized(
            "Incorrect admin key provided. Send the server's --admin-key as `Authorization: Bearer KEY`."
        )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

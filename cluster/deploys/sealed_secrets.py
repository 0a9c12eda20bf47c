"""Keeps keys in Ray's own store under names that reveal nothing, since Ray's dashboard shows the options in which they
would otherwise be."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from ray.experimental import internal_kv

from lorafleet.cluster.deploys.changed_options import SEALED
from lorafleet.protocol.errors import ConfigError

_NAMESPACE = b"lorafleet"
_SALT = b"salt"


def seal(secret: str) -> str:
    """Stores a secret for all processes of this Ray cluster, and returns its name. Equal secrets have equal names."""
    internal_kv._internal_kv_put(_SALT, secrets.token_bytes(32), overwrite=False, namespace=_NAMESPACE)
    salt = internal_kv._internal_kv_get(_SALT, namespace=_NAMESPACE)
    name = SEALED + hmac.new(salt, secret.encode(), hashlib.sha256).hexdigest()
    internal_kv._internal_kv_put(name.encode(), secret.encode(), overwrite=True, namespace=_NAMESPACE)
    return name


def unseal(name: str) -> str:
    """Returns the secret that seal() has stored under this name. Raises ConfigError if there is none."""
    found: bytes | None = internal_kv._internal_kv_get(name.encode(), namespace=_NAMESPACE)
    if found is None:
        raise ConfigError("Ray has lost the keys that this application was deployed with. Deploy it again.")
    return found.decode()

"""Changes the tenants of a file of keys when their keys come and go, so that a tenant's name is never given to another
tenant unnoticed."""

from __future__ import annotations

from datetime import datetime

from lorafleet.cluster.tenancy.key_file import KeyEntry, KeyFile, TenantEntry
from lorafleet.protocol.errors import InvalidRequest


def without_key(file: KeyFile, key: KeyEntry, now: datetime) -> KeyFile:
    """Returns the file without a key. If its tenant has no other key, the file keeps the tenant and says since when
    it has none, so that with_tenant() can ask whether the next key goes to the same tenant."""
    kept = [other for other in file.keys if other is not key]
    tenants = dict(file.tenants)
    if key.tenant is not None and all(other.tenant != key.tenant for other in kept):
        entry = tenants.get(key.tenant, TenantEntry())
        tenants[key.tenant] = entry.model_copy(update={"without_keys_since": now})
    return file.model_copy(update={"keys": kept, "tenants": tenants})


def with_tenant(file: KeyFile, tenant: str, same: bool | None) -> KeyFile:
    """Returns the file as it must be before a key is made for this tenant.

    Args:
        same: Whether a tenant that has lost all its keys is the one that gets the new key. If it is not, the name gets
            another holder, with nothing of the former's. None: the caller has not said.

    Raises InvalidRequest if the file cannot tell and the caller has not said, or if the caller's word is needless.
    """
    entry = file.tenants.get(tenant)
    if entry is None or entry.without_keys_since is None:
        if same is None:
            return file
        raise InvalidRequest(
            f"Tenant {tenant!r} has keys, or never had one, so there is nothing to decide. Leave --same-tenant and "
            "--new-tenant out."
        )
    if same is None:
        raise InvalidRequest(
            f"Tenant {tenant!r} has had no key since {entry.without_keys_since:%Y-%m-%d}. Give --same-tenant if the "
            "new key is for the same tenant, whose adapters, files and usage it continues. Give --new-tenant if "
            "another tenant gets this name: it gets nothing of the former's, and none of its settings."
        )
    kept = entry.model_copy(update={"without_keys_since": None})
    return file.model_copy(
        update={"tenants": {**file.tenants, tenant: kept if same else TenantEntry(holder=entry.holder + 1)}}
    )

"""Puts a tenant's limits into the terms of a push, whichever route it came by. storage_quota.py checks them."""

from __future__ import annotations

import msgspec

from lorafleet.api.app_state import AppState
from lorafleet.api.backend import StorageLimits
from lorafleet.protocol.admin_verbs import PushTerms
from lorafleet.protocol.names import tenant_of


def limited(terms: PushTerms, limits: StorageLimits) -> PushTerms:
    """Returns the terms with these limits."""
    return msgspec.structs.replace(terms, max_adapters=limits.adapters, max_bytes=limits.num_bytes)


def limited_for_owner(terms: PushTerms, state: AppState, full: str) -> PushTerms:
    """Returns the terms with the limits of the tenant that owns the adapter of this full name."""
    return limited(terms, state.access.tenants.storage_limits(tenant_of(full)))

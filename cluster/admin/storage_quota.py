"""Limits the number and the bytes of the adapters that a tenant has in the catalogue."""

from __future__ import annotations

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, stored_bytes_of
from lorafleet.protocol.admin_verbs import PushTerms
from lorafleet.protocol.errors import QuotaExceeded
from lorafleet.protocol.names import tenant_of


class StorageQuota:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def check(self, adapter: AdapterRecord, terms: PushTerms) -> None:
        """Raises QuotaExceeded if the owning tenant would exceed the limits in `terms` with the adapter as given."""
        tenant = tenant_of(adapter.name)
        if tenant is None:
            return
        owned = self._catalogue.state.owned(tenant)
        others = {name: size for name, size in owned.items() if name != adapter.name}
        num_bytes = sum(others.values()) + stored_bytes_of(adapter)
        if terms.max_adapters is not None and len(others) + 1 > terms.max_adapters:
            raise QuotaExceeded(
                f"Tenant {tenant!r} would have {len(others) + 1} adapters; its limit is {terms.max_adapters}. Remove "
                "one, or ask the operator to raise the limit `adapters`.",
                "name",
            )
        self.check_bytes(adapter.name, num_bytes, terms)

    @staticmethod
    def check_bytes(name: str, num_bytes: int, terms: PushTerms) -> None:
        """Raises QuotaExceeded if this number of bytes alone is more than the owning tenant may have."""
        tenant = tenant_of(name)
        if tenant is not None and terms.max_bytes is not None and num_bytes > terms.max_bytes:
            raise QuotaExceeded(
                f"Tenant {tenant!r} would have {num_bytes} bytes of adapters, with all files of all versions; its "
                f"limit is {terms.max_bytes}. Remove adapters that are not needed, or ask the operator to raise the "
                "limit `adapter_bytes`.",
                "name",
            )

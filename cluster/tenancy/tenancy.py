"""Builds a replica's gate, quotas, metering and audit log from the configuration: everything that depends on keys
and tenants."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from lorafleet.api.access.access import Access
from lorafleet.api.access.audit import NoAudit
from lorafleet.api.access.caller_admission import NoQuotas
from lorafleet.api.access.gate import Gate
from lorafleet.api.access.usage import NoMeter
from lorafleet.api.access.visibility import NoTenants
from lorafleet.cluster.tenancy.audit_log import AuditLog
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.quota_client import QUOTA_TIMING, Admit, QuotaClient, QuotaTiming
from lorafleet.cluster.tenancy.usage_log import UsageLog


class Tenancy:
    """Everything that a replica knows about keys and tenants. A log whose folder is None is not written."""

    def __init__(
        self,
        admin_key: str | None,
        api_keys: str | None,
        usage_folder: Path | None,
        audit_folder: Path | None,
        replica_id: str,
        admit: Admit,
        timing: QuotaTiming = QUOTA_TIMING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        keys = self.keys = None if api_keys is None else KeyRing(api_keys)
        self.gate = Gate(admin_key, None if keys is None else lambda: keys.keys)
        self.quotas = None if keys is None else QuotaClient(keys, admit, timing, clock)
        self.usage = None if usage_folder is None else UsageLog(usage_folder, replica_id)
        self.audit = None if audit_folder is None else AuditLog(audit_folder, replica_id)

    def change_keys(self, admin_key: str | None, api_keys: str | None) -> None:
        """Makes other keys valid. Raises ConfigError, and changes nothing, if they cannot be read. A server without API
        keys cannot get some so: limits and metering begin with the server."""
        assert (api_keys is None) == (self.keys is None)
        if self.keys is not None and api_keys is not None:
            self.keys.change_source(api_keys)
        self.gate.set_admin_key(admin_key)

    @property
    def access(self) -> Access:
        return Access(
            self.gate,
            self.quotas or NoQuotas(),
            self.keys or NoTenants(),
            self.usage or NoMeter(),
            self.audit or NoAudit(),
        )

    @property
    def collectors(self) -> Iterator[Collector]:
        yield from (collector for collector in (self.keys, self.usage, self.audit) if collector is not None)

    @property
    def work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The coroutines that run beside the requests."""
        if self.keys is not None:
            yield self.keys.follow()
        if self.usage is not None:
            yield self.usage.lines.keep_syncing()

    def close(self) -> None:
        if self.usage is not None:
            self.usage.lines.close()
        if self.audit is not None:
            self.audit.close()

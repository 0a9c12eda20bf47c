"""Bundles what decides who may send which requests, and what accounts for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lorafleet.api.access.audit import Audit, NoAudit
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.caller_admission import NoQuotas, Quotas
from lorafleet.api.access.gate import Gate
from lorafleet.api.access.usage import NoMeter, UsageMeter
from lorafleet.api.access.visibility import NoTenants, Tenants
from lorafleet.protocol.errors import LorafleetError


@dataclass(frozen=True, slots=True)
class Access:
    """The access to one replica. By default everyone may infer without limits, and nothing is written down."""

    gate: Gate = field(default_factory=Gate)  # Authenticates callers.
    quotas: Quotas = field(default_factory=NoQuotas)  # Limits what callers may request.
    tenants: Tenants = field(default_factory=NoTenants)  # Knows which tenant owns which adapter names.
    meter: UsageMeter = field(default_factory=NoMeter)  # Records the usage of every sequence.
    audit: Audit = field(default_factory=NoAudit)  # Records every administrative call.

    def shows_paths_to(self, caller: Caller) -> bool:
        """Returns whether the caller may see paths on the server. Without API keys, everyone may."""
        if caller.is_operator:
            return True
        try:
            self.gate.caller(None, "metrics")
        except LorafleetError:
            return False
        return True

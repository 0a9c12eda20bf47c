"""The replicas where an adapter is resident, as the console's route answers it (cluster/console/state_api.py)."""

from __future__ import annotations

import msgspec

from lorafleet.protocol.admin_verbs import AdapterVerb, HttpRoute


class VersionPlaces(msgspec.Struct, frozen=True):
    number: int | None  # None if a resolver found the adapter.
    tiers: dict[str, str]  # Replica -> "gpu", "cpu", or "coming" while it is on its way to the GPU.


class AdapterPlaces(msgspec.Struct, frozen=True):
    versions: list[VersionPlaces]


class ShowPlaces(AdapterVerb[AdapterPlaces], frozen=True):
    http = HttpRoute("GET", "/v1/console/adapters/{name}", "One adapter, as the console shows it")

"""The replicas where adapters are resident, as the console's routes answer it (cluster/console/state_api.py)."""

from __future__ import annotations

import msgspec

from lorafleet.protocol.admin_verbs import AdapterVerb, HttpRoute, Verb

MAX_PLACES_LISTED = 200


class VersionPlaces(msgspec.Struct, frozen=True):
    number: int | None  # None if a resolver found the adapter.
    tiers: dict[str, str]  # Replica -> "gpu", "cpu", or "coming" while it is on its way to the GPU.


class AdapterPlaces(msgspec.Struct, frozen=True):
    versions: list[VersionPlaces]


class ShowPlaces(AdapterVerb[AdapterPlaces], frozen=True):
    http = HttpRoute("GET", "/v1/console/adapters/{name}", "One adapter, as the console shows it")


class NamedPlaces(AdapterPlaces, frozen=True):
    name: str


class PlacesPage(msgspec.Struct, frozen=True):
    adapters: list[NamedPlaces]
    has_more: bool
    after: str | None  # Name of the last adapter.


class ListPlaces(Verb[PlacesPage], frozen=True, omit_defaults=True):
    """Returns a page in the order of names. Adapters that resolvers found are in it, too."""

    http = HttpRoute("GET", "/v1/console/state", "The cluster, as the console shows it")

    after: str = ""
    limit: int = MAX_PLACES_LISTED

"""The calls of /v1/quality (cluster/quality/routes.py), which the clients send as they send the verbs of adapters."""

from __future__ import annotations

from lorafleet.client.results import Quality, QualityList
from lorafleet.protocol.admin_verbs import HttpRoute, Verb

_MODEL = "/v1/quality/{name}"


class ListQuality(Verb[QualityList], frozen=True):
    http = HttpRoute("GET", "/v1/quality", "Compare models with their baselines")


class RunQuality(Verb[Quality], frozen=True):
    http = HttpRoute("POST", f"{_MODEL}/run", "Run a model's quality probes")

    name: str


class AcceptQuality(Verb[Quality], frozen=True):
    http = HttpRoute("POST", f"{_MODEL}/accept", "Make a model's present results its new baseline")

    name: str

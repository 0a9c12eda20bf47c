"""Checks that the version which answers a request is the one, or one of those, that the request demands."""

from __future__ import annotations

from typing import Protocol

from lorafleet.api.served_model import ServedModel
from lorafleet.protocol.errors import InvalidRequest, WeightVersionMismatch
from lorafleet.protocol.messages import VersionDemand


class Demanding(Protocol):
    """A body that may demand a version."""

    weight_version: int | None
    min_weight_version: int | None


def read_demand(model: ServedModel, body: Demanding) -> VersionDemand:
    """Returns how the engine must treat the request. Raises WeightVersionMismatch."""
    exact, least = body.weight_version, body.min_weight_version
    if exact is None and least is None:
        return "any"
    param = "weight_version" if exact is not None else "min_weight_version"
    if exact is not None and least is not None:
        raise InvalidRequest("Give either `weight_version` or `min_weight_version`.", param)
    version = 0 if model.lora is None else model.lora.version
    if not version:
        raise InvalidRequest(
            f"`{param}` is given, but the model `{model.name}` has no versions; only adapters of the catalogue have "
            "them. Leave it out.",
            param,
        )
    if exact not in (None, version) or version < (least or 0):
        wanted = f"version {exact}" if exact is not None else f"version {least} or a later one"
        raise WeightVersionMismatch(
            f"The model `{model.name}` is at version {version}, but the request demands {wanted}. Wait until it is "
            "pushed, or leave the field out.",
            param,
            version,
        )
    return "least" if exact is None else "exact"

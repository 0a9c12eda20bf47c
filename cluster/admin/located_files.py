"""Finds the files of the version of an adapter that a caller wants to read."""

from __future__ import annotations

from lorafleet.cluster.admin.adapter_changes import not_found
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, in_words
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.admin_verbs import Located
from lorafleet.protocol.errors import InvalidRequest


def located(directory: AdapterDirectory, name: str, version: int | None) -> Located:
    """Returns a version of the adapter with this public name; None selects the version that the name stands for.

    Raises ModelNotFound, also for an adapter that is being removed, and InvalidRequest if the version does not exist
    or several versions share the name.
    """
    state = directory.catalogue.state
    adapter = state.owner(name)
    if adapter is not None:
        number = _only_version(adapter, name) if version is None else version
        return Located(state.request(name, adapter.version(number)), number)
    served = directory.names.served(name)
    if served is None:
        raise not_found(name)
    if version is not None:
        raise InvalidRequest(
            f"`version` is {version}, but adapter {name!r} was found by a resolver, so it has no versions. Leave "
            "`version` out.",
            "version",
        )
    return Located(served.loras[0])


def _only_version(adapter: AdapterRecord, alias: str) -> int:
    shares = adapter.shares(alias)
    if len(shares) > 1:
        raise InvalidRequest(
            f"the name {alias!r} stands for {in_words(shares)}; say in `version` which one to download.", "version"
        )
    return shares[0].version

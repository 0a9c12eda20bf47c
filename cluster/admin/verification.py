"""Compares the stored files of an adapter's versions with the digests under which they were registered."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, VersionRecord
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterChanged, InvalidRequest
from lorafleet.protocol.lora_request import turn_group
from lorafleet.protocol.names import tenant_of
from lorafleet.resolvers.source import is_uri
from lorafleet.sandbox.job_turns import TurnLimits

# Versions whose files are read again: `running` limits those at a time, `waiting` those of one tenant.
VERIFICATIONS = TurnLimits(running=2, waiting=16)


class Verification:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._threads = FairThreads("verifications", VERIFICATIONS)

    async def verify(self, adapter: AdapterRecord) -> None:
        """Reads the files of every version again. Raises AdapterChanged for a version whose bytes differ from those
        that were registered, and InvalidRequest for a version at a URI, of which the catalogue has no files."""
        for version in adapter.versions:
            if is_uri(version.location):
                raise InvalidRequest(
                    f"version {version.number} of adapter {adapter.name!r} is stored at {version.location}, not in the "
                    "catalogue: replicas check its digest whenever they fetch it. Push it to have a copy that can be "
                    "verified."
                )
            group = turn_group(tenant_of(adapter.name), None)
            digest = await self._threads.run(group, functools.partial(self._read_again, version))
            if digest != version.digest:
                raise AdapterChanged(
                    f"version {version.number} of adapter {adapter.name!r} was registered with digest "
                    f"{version.digest[:12]}…, but its files now have digest {digest[:12]}…. Push it again, "
                    "and roll back until then."
                )

    def _read_again(self, version: VersionRecord) -> str:
        if version.location:
            return folder_digest(Path(version.location))
        with tempfile.TemporaryDirectory(prefix="lorafleet-verify-") as folder:
            self._catalogue.store.fetch_files(version.digest, Path(folder))
            return folder_digest(Path(folder))

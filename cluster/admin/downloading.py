"""Downloads from a replica's side: brings an adapter's files to this node, checks them, and reads them in chunks."""

from __future__ import annotations

import functools

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.cluster.admin.download_tar import AdapterTar, open_packed
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.resolvers.store import AdapterStore
from lorafleet.sandbox.job_turns import TurnLimits

# Downloads whose files are fetched from their source, or read to compare their digest. `running` limits those of all
# tenants, `waiting` those of one tenant.
DOWNLOADS = TurnLimits(running=4, waiting=128)
CHUNKS = TurnLimits(running=4, waiting=128)  # The same for the chunks that are read; a chunk takes milliseconds.


class AdapterDownloads:
    """The downloads of a replica. Calls of a group wait for their turn; the group is that of turn_group()."""

    def __init__(self, sources: AdapterStore) -> None:
        self._sources = sources
        self._opening = FairThreads("downloads", DOWNLOADS)
        self._reading = FairThreads("chunks of downloads", CHUNKS)

    async def open(self, lora: LoRARequest, group: str) -> AdapterTar:
        """Opens the adapter's files, which the caller must close. Raises QueueFull, AdapterChanged if they do not have
        the adapter's digest, and another AdapterError if they cannot be read."""
        use = functools.partial(open_packed, digest=lora.digest)
        return await self._opening.run(group, functools.partial(self._sources.read, lora.lora_path, lora.digest, use))

    async def read(self, packed: AdapterTar, group: str) -> bytes:
        """Returns the next bytes of a download, or b"" at its end."""
        return await self._reading.run(group, packed.read)

    def close(self) -> None:
        self._opening.close()
        self._reading.close()

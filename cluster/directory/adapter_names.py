"""Knows what each public name stands for: adapters of the catalogue, and those that resolvers have found."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_state import Served
from lorafleet.cluster.directory.directory_epoch import DirectoryEpoch
from lorafleet.cluster.directory.directory_messages import Found, StaleEpoch
from lorafleet.cluster.directory.found_names import FoundNames
from lorafleet.cluster.directory.recent_changes import RecentChanges
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.routing.routing import TYPICAL_BYTES
from lorafleet.protocol.lora_request import LoRARequest

MAX_FOUND = 100_000  # Names found by resolvers; the oldest is dropped, and looked up again when it is requested.
MAX_NAMES_LISTED = 2000  # Names in one answer of `list_loras`.
MAX_CHANGES = 10_000  # Changed names recorded for replicas that are behind; a replica further behind joins again.


class AdapterNames:
    """The names of one directory. Every change of a name gets a version of its own, so that replicas can ask for the
    changes after the version that they know.

    Args:
        on_change: receives the names that stand for something else now.
    """

    def __init__(
        self, catalogue: Catalogue, epoch: DirectoryEpoch, on_change: Callable[[Collection[str]], None]
    ) -> None:
        self.found = FoundNames()
        self.version = 0
        self._catalogue = catalogue
        self._epoch = epoch
        self._on_change = on_change
        self._changes = RecentChanges[str]()
        self._since: dict[str, int] = {}  # Version of each served name that changed in this epoch.
        catalogue.on_change = self._publish

    # -- lookups --------------------------------------------------------------------------------------------------

    def served(self, name: str) -> Served | None:
        since = self._since.get(name, 0)
        served = self._catalogue.state.served(name, since)
        if served is None and name in self.found:
            return Served(name, name, since, (self.found.by_name[name],), (1.0,), found=True)
        return served

    async def lookup(self, epoch: str, name: str) -> Found:
        await self._epoch.until_loaded()
        self._epoch.check(epoch)
        return Found(self.version, self.served(name))

    async def list_loras(self, epoch: str, after: str, end: str, limit: int) -> list[LoRARequest]:
        """Returns the adapters of the first public names that are greater than `after` and less than `end`, at most
        MAX_NAMES_LISTED. For a split it returns the first version."""
        await self._epoch.until_loaded()
        self._epoch.check(epoch)
        limit = min(limit, MAX_NAMES_LISTED)
        in_catalogue = self._catalogue.state.alias_names.between(after, end, limit)
        names = itertools.islice(heapq.merge(in_catalogue, self.found.index.between(after, end, limit)), limit)
        loras: list[LoRARequest] = []
        await in_slices(self._append_loras(names, loras))
        return loras

    def _append_loras(self, names: Iterator[str], loras: list[LoRARequest]) -> Iterator[None]:
        for name in names:
            served = self.served(name)
            if served is not None:
                loras.append(served.loras[0])
            yield

    def changed_since(self, version: int) -> dict[str, Served | None]:
        """Returns the names that changed after `version`. Raises StaleEpoch if these are no longer known."""
        if version < self._changes.forgotten:
            raise StaleEpoch(self._epoch.id)
        return {name: self.served(name) for name in self._changes.since(version)}

    # -- bytes behind names ---------------------------------------------------------------------------------------

    def names_of(self, digest: str) -> list[str]:
        """Returns the public names that stand for these bytes, or for a share of them."""
        return [*self._catalogue.state.names(digest), *self.found.names_of(digest)]

    def owners(self, digest: str) -> list[str]:
        """Returns the names of the adapters that have these bytes."""
        return [*self._catalogue.state.users(digest), *self.found.names_of(digest)]

    def digests_of(self, name: str) -> tuple[str, ...]:
        served = self.served(name)
        return tuple(lora.digest for lora in served.loras) if served is not None else ()

    def all_digests(self) -> Iterator[str]:
        """Yields the digests behind the public names that exist when the iteration begins."""
        for name in [*self._catalogue.state.aliases(), *self.found.by_name]:
            yield from self.digests_of(name)

    def lora_of(self, digest: str) -> LoRARequest | None:
        """Returns a request for these bytes, or None if no name stands for them."""
        for name in self.names_of(digest):
            served = self.served(name)
            for lora in served.loras if served is not None else ():
                if lora.digest == digest:
                    return lora
        return None

    def size(self, digest: str) -> tuple[int, int] | None:
        """Returns the bytes and the rank of an adapter in the catalogue, or None."""
        versions = self._catalogue.state.versions(digest)
        return (versions[0].num_bytes, versions[0].rank) if versions else None

    def num_bytes(self, digest: str) -> int:
        size = self.size(digest)
        return size[0] if size is not None else TYPICAL_BYTES

    # -- changes --------------------------------------------------------------------------------------------------

    async def record_found(self, epoch: str, lora: LoRARequest) -> Found:
        """Records an adapter that a resolver has found and a worker has read. The first replica to record a name
        wins."""
        await self._epoch.until_loaded()
        self._epoch.check(epoch)
        self.add_found(lora)
        return Found(self.version, self.served(lora.lora_name))

    def add_found(self, lora: LoRARequest) -> None:
        """Adds an adapter that a resolver has found, unless its name stands for something already."""
        if self.served(lora.lora_name) is not None:
            return
        self.found.add(lora)
        self._publish({lora.lora_name})
        if len(self.found) > MAX_FOUND:
            self.forget_found(next(iter(self.found.by_name)))

    def forget_found(self, name: str) -> bool:
        """Removes a name that only resolvers know, and returns whether it was there. It is looked up again when it is
        requested."""
        if not self.found.drop(name):
            return False
        self._publish({name})
        return True

    def _publish(self, names: Collection[str]) -> None:
        for name in names:
            self.version += 1
            self._changes.record(name, self.version)
            is_owned = self._catalogue.state.owner_name(name) is not None
            if is_owned:
                self.found.drop(name)
            if is_owned or name in self.found:
                self._since[name] = self.version
            else:
                self._since.pop(name, None)
        self._changes.shrink(MAX_CHANGES)
        self._on_change(names)

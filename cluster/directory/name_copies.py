"""A replica's copies of what names stand for. Each belongs to one version of the directory's names, up to which the
copies are correct."""

from __future__ import annotations

from lorafleet.cluster.catalogue.catalogue_state import Served
from lorafleet.cluster.catalogue.log_end import LogPosition
from lorafleet.cluster.directory.directory_messages import Changes, Found
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.names import tenant_of

MAX_COPIES = 100_000  # Names; the oldest copy is evicted first.


class NameCopies:
    """The copies of the names that were requested at this replica."""

    def __init__(self) -> None:
        self.version = -1
        self.log = LogPosition("", 0)  # The part of the catalogue's log that the copies reflect.
        self._copies: dict[str, Served] = {}
        # Names of tenants that stand for nothing. A tenant's requests for public adapters look these names up first.
        self._absent: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies or name in self._absent

    def get(self, name: str) -> Served | None:
        return self._copies.get(name)

    @property
    def names(self) -> list[str]:
        return list(self._copies)

    @property
    def found(self) -> list[LoRARequest]:
        """The adapters that resolvers have found."""
        return [copy.loras[0] for copy in self._copies.values() if copy.found]

    def add(self, name: str, answer: Found) -> Served | None:
        """Copies the answer to a lookup, unless it is older than the copies. Returns what the name stands for."""
        if answer.version >= self.version:
            self._replace(name, answer.served)
            if answer.served is None and tenant_of(name) is not None:
                self._absent[name] = None
                if len(self._absent) > MAX_COPIES:
                    del self._absent[next(iter(self._absent))]
        return answer.served

    def apply(self, changes: Changes) -> None:
        """Applies the changes of names that have a copy; names that nobody requested here are not copied."""
        for name, served in changes.served.items():
            self._absent.pop(name, None)
            if name in self._copies:
                self._replace(name, served)
        self.version = changes.version
        if changes.log.store_id:  # Otherwise the catalogue is still being read.
            self.log = changes.log

    def begin_epoch(self) -> None:
        """Makes the copies older than any version of a directory that has begun a new epoch."""
        self.version = -1

    def forget_absent(self) -> None:
        """Forgets which names stand for nothing, since the answer to a JoinCall covers only the copies."""
        self._absent.clear()

    def _replace(self, name: str, served: Served | None) -> None:
        if served is None:
            self._copies.pop(name, None)
            return
        self._copies[name] = served
        if len(self._copies) > MAX_COPIES:
            del self._copies[next(iter(self._copies))]

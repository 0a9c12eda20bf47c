"""Fills empty host memory with adapters that nobody has requested yet, so that first requests need not wait for a disk.
`fill_cpu_loras` turns it on. It takes no memory from adapters that are there."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from lorafleet.cluster.directory.placement import STEP
from lorafleet.cluster.directory.residency import Residency
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

FULL = 0.9  # Share of a replica's host memory; the rest is for adapters that are requested meanwhile.
AT_ONCE = 4  # Adapters that one replica is ordered to read per round.
SCAN = 1000  # Adapters examined per round.


class Filler:
    """Chooses the adapters that replicas read into empty host memory.

    Args:
        adapters: returns all adapters, anew at each call.
        prefetch: prefetch(replica, adapter) orders the replica to read the adapter.
    """

    def __init__(
        self,
        residency: Residency,
        adapters: Callable[[], Iterable[str]],
        prefetch: Callable[[str, str], object],
    ) -> None:
        self.num_told = 0
        self._residency = residency
        self._adapters = adapters
        self._prefetch = prefetch
        self._unseen: Iterator[str] = iter(())  # The rest of a pass over all adapters.
        # Adapter -> replica that was ordered to read it, while both exist. So a failed read is not repeated forever.
        self._told: dict[str, str] = {}
        self._told_before: dict[str, str] = {}  # Entries that this pass has not reached; any left at its end are gone.

    def steps(self, leaving: Container[str]) -> Iterator[None]:
        """Does a round's share of the work, in short steps. Replicas in `leaving` receive nothing more."""
        room = self._room(leaving)
        rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
        for at in range(SCAN):
            if not room:
                return
            adapter = next(self._unseen, None)
            if adapter is None:
                self._unseen = iter(self._adapters())
                self._told, self._told_before = {}, self._told
                return
            if adapter in self._told_before:
                self._told[adapter] = self._told_before.pop(adapter)
            if not self._residency.holders(adapter) and self._told.get(adapter) not in self._residency.loads:
                replica = rendezvous.first(key_of(adapter), 1)[0]
                self._told[adapter] = replica
                self.num_told += 1
                self._prefetch(replica, adapter)
                room[replica] -= 1
                if not room[replica]:
                    del room[replica]
                    rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
            if at % STEP == 0:
                yield

    def _room(self, leaving: Container[str]) -> dict[str, int]:
        """Returns how many adapters each replica may read. A replica with unread adapters is left out, since requests
        may wait for its disk."""
        residency, room = self._residency, {}
        for replica, load in residency.loads.items():
            left = int(FULL * residency.cpu_loras[replica]) - len(residency.held(replica))
            if left > 0 and not load.reading_bytes and replica not in leaving:
                room[replica] = min(AT_ONCE, left)
        return room

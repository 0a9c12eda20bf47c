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
        digests: returns the digests of all adapters, anew at each call.
        prefetch: prefetch(replica, adapter) orders the replica to read the adapter.
    """

    def __init__(
        self,
        residency: Residency,
        digests: Callable[[], Iterable[str]],
        prefetch: Callable[[str, str], object],
    ) -> None:
        self.num_ordered = 0
        self._residency = residency
        self._digests = digests
        self._prefetch = prefetch
        self._unseen: Iterator[str] = iter(())  # The rest of a pass over all adapters.
        # Adapter -> replica that was ordered to read it, while both exist. So a failed read is not repeated forever.
        self._ordered: dict[str, str] = {}
        self._ordered_before: dict[str, str] = {}  # Entries that this pass has not reached; those left at its end go.

    def steps(self, leaving: Container[str]) -> Iterator[None]:
        """Does a round's share of the work, in short steps. Replicas in `leaving` receive nothing more."""
        room = room_in(self._residency, leaving)
        rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
        for step in range(SCAN):
            if not room:
                return
            digest = next(self._unseen, None)
            if digest is None:
                self._unseen = iter(self._digests())
                self._ordered, self._ordered_before = {}, self._ordered
                return
            if digest in self._ordered_before:
                self._ordered[digest] = self._ordered_before.pop(digest)
            if not self._residency.holders(digest) and self._ordered.get(digest) not in self._residency.loads:
                replica = rendezvous.first(key_of(digest), 1)[0]
                self._ordered[digest] = replica
                self.num_ordered += 1
                self._prefetch(replica, digest)
                room[replica] -= 1
                if not room[replica]:
                    del room[replica]
                    rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
            if step % STEP == 0:
                yield


def room_in(residency: Residency, leaving: Container[str]) -> dict[str, int]:
    """Returns how many adapters each replica may read into empty host memory in one round. A replica with unread
    adapters is left out, since requests may wait for its disk."""
    room = {}
    for replica, load in residency.loads.items():
        left = int(FULL * residency.cpu_loras[replica]) - len(residency.held(replica))
        if left > 0 and not load.reading_bytes and replica not in leaving:
            room[replica] = min(AT_ONCE, left)
    return room

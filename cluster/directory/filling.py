"""Fills host memory that is empty with adapters that nobody has asked for yet, so that first requests need not wait for
a disk. Switched on by `fill_cpu_loras`; takes no room from an adapter that is there."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from lorafleet.cluster.directory.placement import STEP
from lorafleet.cluster.directory.residency import Residency
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

FULL = 0.9  # of a replica's host memory; the rest is for what is asked for meanwhile
AT_ONCE = 4  # adapters that one replica is told to read in a round
SCAN = 1000  # adapters looked at in a round


class Filler:
    """adapters: all there are, anew at each call. prefetch(replica, adapter): the replica should read it."""

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
        self._unseen: Iterator[str] = iter(())  # what is left of a pass over all
        # adapter -> replica, for as long as both live: what fails is not tried for ever.
        self._told: dict[str, str] = {}
        self._told_before: dict[str, str] = {}  # what this pass has not come by yet; the rest of it is gone at its end

    def steps(self, leaving: Container[str]) -> Iterator[None]:
        """A round's share of the work, in short steps. leaving: replicas that take nothing more."""
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
        """Adapters that each replica may read, where nobody waits for its disk."""
        residency, room = self._residency, {}
        for replica, load in residency.loads.items():
            left = int(FULL * residency.cpu_loras[replica]) - len(residency.held(replica))
            if left > 0 and not load.reading_bytes and replica not in leaving:
                room[replica] = min(AT_ONCE, left)
        return room

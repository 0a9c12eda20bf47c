"""Predicts which adapters will be requested again, and has them read into empty host memory before that.

A new or restarted replica has empty memory, and the adapters that it held are perhaps held by nobody. Those that were
requested in the last minutes are then read again, the most requested ones first, at replicas for whose disk no request
waits. It takes no memory from adapters that are there, since eviction has chosen these over those that are gone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, Mapping

from lorafleet.cluster.directory.filling import room_in
from lorafleet.cluster.directory.placement import STEP, Homes
from lorafleet.cluster.directory.residency import Residency
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

REMEMBER_S = 600.0  # Seconds over which the predicted demand is averaged, approximately.
LEAST_TOKENS_S = 0.05  # Tokens per second below which an adapter is not expected to be requested.
MAX_ADAPTERS = 100_000  # Adapters whose demand is remembered.
SCAN = 2000  # Adapters examined per round.
AT_ONCE = 1  # Adapters that one replica is ordered to read per round: a request may come while its disk reads.
AGAIN_S = 60.0  # Seconds until a read that has not succeeded is ordered again.


class Forecast:
    """The predicted demand of each adapter: the mean of its requested tokens per second, in which the latest weigh
    most."""

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self._max_adapters = max_adapters
        # Tokens per second, and when; the adapter that was requested longest ago comes first.
        self._seen: dict[str, tuple[float, float]] = {}

    def observe(self, now: float, tokens: Mapping[str, int]) -> None:
        """Adds the tokens that were requested since the last call."""
        for digest, count in tokens.items():
            demand = self.of(digest, now) + count / REMEMBER_S
            self._seen.pop(digest, None)
            self._seen[digest] = demand, now
        while len(self._seen) > self._max_adapters:
            del self._seen[next(iter(self._seen))]

    def of(self, digest: str, now: float) -> float:
        """Returns the tokens per second that are expected for the adapter."""
        demand, seen_s = self._seen.get(digest, (0.0, now))
        return demand * math.exp((seen_s - now) / REMEMBER_S)

    def adapters(self) -> list[str]:
        """Returns the remembered adapters. The one that was requested last comes last."""
        return list(self._seen)


class Prefetcher:
    """Chooses the adapters that replicas read again into empty host memory.

    Args:
        prefetch: prefetch(replica, adapter) orders the replica to read the adapter.
    """

    def __init__(self, residency: Residency, prefetch: Callable[[str, str], object]) -> None:
        self.num_ordered = 0
        self._forecast = Forecast()
        self._residency = residency
        self._prefetch = prefetch
        self._unseen: list[str] = []  # The rest of a pass over the remembered adapters, in reverse.
        self._wanted: list[tuple[float, str]] = []  # A heap of those of this pass, by demand; the highest comes first.
        self._ordered_s: dict[str, float] = {}  # When a read of the adapter was ordered.

    def steps(self, now: float, tokens: Mapping[str, int], homes: Homes, leaving: Container[str]) -> Iterator[None]:
        """Does a round's share of the work, in short steps. Replicas in `leaving` receive nothing more."""
        self._forecast.observe(now, tokens)
        room = dict.fromkeys(room_in(self._residency, leaving), AT_ONCE)
        if not room:
            return
        self._ordered_s = {digest: at_s for digest, at_s in self._ordered_s.items() if now - at_s < AGAIN_S}
        yield from self._scan(now)
        rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
        while room and self._wanted:
            digest = heapq.heappop(self._wanted)[1]
            if self._residency.holders(digest):
                continue
            home = next((home for home in homes.get(digest, ()) if home in room), None)
            replica = rendezvous.first(key_of(digest), 1)[0] if home is None else home
            self._ordered_s[digest] = now
            self.num_ordered += 1
            self._prefetch(replica, digest)
            room[replica] -= 1
            if not room[replica]:
                del room[replica]
                rendezvous = Rendezvous(dict.fromkeys(room, 1.0))
            yield

    def _scan(self, now: float) -> Iterator[None]:
        """Examines the next adapters of a pass, those that were requested last first."""
        if not self._unseen:
            self._unseen = self._forecast.adapters()
            self._wanted.clear()
        for step in range(min(SCAN, len(self._unseen))):
            digest = self._unseen.pop()
            demand = self._forecast.of(digest, now)
            is_wanted = demand >= LEAST_TOKENS_S and digest not in self._ordered_s
            if is_wanted and not self._residency.holders(digest):
                heapq.heappush(self._wanted, (-demand, digest))
            if step % STEP == 0:
                yield

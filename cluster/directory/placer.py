"""The directory's placement round, which measures demand from the replicas' reports and sets where adapters should
live.

Its outcome goes two ways. Routers receive the homes through Residency, and replicas receive the adapters that they
should read before they are requested. A round is an iterator of short steps, since it runs on the directory's event
loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lorafleet.cluster.directory.filling import Filler
from lorafleet.cluster.directory.placement import STEP, Homes, PlacedAdapter, Placement
from lorafleet.cluster.directory.prefetching import Prefetcher
from lorafleet.cluster.directory.residency import Placed, Residency
from lorafleet.cluster.routing.routing import TYPICAL_BYTES

ROUND_S = 1.0
MEMORY_S = 6.0  # Seconds over which demand is averaged, approximately.
FORGET_TOKENS_S = 0.5  # Tokens per second; an adapter with less demand is left to its rendezvous home.
WARM_UP_S = 30.0  # Seconds until a new replica has its full share.
NEW_WEIGHT = 0.1
READ_AHEAD = 4  # Adapters that one replica is ordered to read per round.
ROOM = 0.8  # Share of a replica's host memory that is filled ahead.

Prefetch = Callable[[str, str], object]
Sizes = Callable[[str], tuple[int, int] | None]  # An adapter's bytes and rank; None: the catalogue lacks it.
Pins = Callable[[], Mapping[str, tuple[str, ...]]]  # By adapter: the replicas that hold it in a slot.
_TIERS = ("gpu", "coming", "cpu")


@dataclass(slots=True)
class PlacerCounts:
    """The counts since the directory's start; `placed` and `homes` are present values."""

    placed: int = 0  # Adapters that have homes now.
    homes: int = 0  # Homes of all these adapters together.
    rounds: int = 0
    round_seconds: float = 0.0  # Includes other work that ran between the slices.
    rebalances: int = 0  # Rounds that gave an adapter another home.
    placements: int = 0  # Adapters that got homes and had none.
    moves: int = 0  # New homes of adapters that had some before.
    moved_bytes: int = 0  # Bytes of the adapters at these homes.
    reads_ahead: int = 0  # Reads that replicas were ordered to do.


class Placer:
    """Runs the rounds of placement.

    Args:
        prefetch: prefetch(replica, adapter) orders the replica to read the adapter soon.
        filler: None leaves host memory empty that no requested adapter needs.
        prefetcher: reads adapters again that are expected to be requested; None waits for the requests.
        places_by_demand: False places pinned adapters only.
    """

    def __init__(
        self,
        residency: Residency,
        sizes: Sizes,
        pins: Pins,
        prefetch: Prefetch,
        filler: Filler | None,
        *,
        prefetcher: Prefetcher | None = None,
        places_by_demand: bool = True,
    ) -> None:
        self.counts = PlacerCounts()
        self._demand: dict[str, float] = {}  # Tokens per second, by adapter.
        self._homes: Homes = {}
        self._residency = residency
        self._sizes = sizes
        self._pins = pins
        self._filler = filler
        self._prefetcher = prefetcher
        self._prefetch = prefetch
        self._places_by_demand = places_by_demand
        self._known_since: dict[str, float] = {}
        self._leaving: set[str] = set()  # Replicas where nothing is placed.
        self._last_s: float | None = None

    def round(self, now: float) -> Iterator[None]:
        """Runs one round, in short steps. Called about every ROUND_S, and never while another round runs."""
        adapters: dict[str, PlacedAdapter] = {}
        tokens = self._residency.take_tokens()
        yield from self._measure(now, tokens, adapters)
        placement = Placement(adapters, self._weights(now), self._homes, self._holders)
        yield from placement.steps()
        yield from self._publish(placement.homes, adapters)
        yield from self._read_ahead(adapters)
        if self._prefetcher is not None:
            yield from self._prefetcher.steps(now, tokens, self._homes, self._leaving)
        if self._filler is not None:
            yield from self._filler.steps(self._leaving)

    def leaves(self, replica_id: str) -> None:
        """Moves the replica's homes elsewhere from the next round on."""
        self._leaving.add(replica_id)

    def stays(self, replica_id: str) -> None:
        """Ends the effect of leaves(), since the replica was not stopped after all, or is gone by now."""
        self._leaving.discard(replica_id)

    def orphans(self, replica_id: str) -> list[tuple[str, str]]:
        """Returns (home, adapter) for the requested adapters that nobody else holds, as far as the homes have room. The
        adapters with the highest demand per byte come first. Called after leaves() and a round."""
        residency, found = self._residency, []
        hot = [digest for digest in residency.held(replica_id) if digest in self._homes]
        room: dict[str, float] = {}
        for digest in sorted(hot, key=self._density, reverse=True):
            home = self._homes[digest][0]
            if home not in room:
                kept = sum(1 for other in residency.held(home) if home in self._homes.get(other, ()))
                room[home] = ROOM * residency.cpu_loras.get(home, 0) - kept
            if room[home] >= 1 and not residency.holders(digest).keys() - self._leaving:
                room[home] -= 1
                found.append((home, digest))
        return found

    def _density(self, digest: str) -> float:
        num_bytes, _ = self._sizes(digest) or (TYPICAL_BYTES, 16)
        return self._demand.get(digest, 0.0) / max(1, num_bytes)

    def _measure(self, now: float, tokens: Mapping[str, int], adapters: dict[str, PlacedAdapter]) -> Iterator[None]:
        """Updates the demand, and fills `adapters` with the adapters that are to be placed."""
        elapsed = now - self._last_s if self._last_s is not None else ROUND_S
        self._last_s = now
        keep = math.exp(-elapsed / MEMORY_S)
        pins = self._pins()
        for step, digest in enumerate(dict.fromkeys([*self._demand, *tokens, *pins])):
            demand = keep * self._demand.pop(digest, 0.0) + (1 - keep) * tokens.get(digest, 0) / elapsed
            if demand > FORGET_TOKENS_S:
                self._demand[digest] = demand
            if (demand > FORGET_TOKENS_S and self._places_by_demand) or digest in pins:
                num_bytes, rank = self._sizes(digest) or (TYPICAL_BYTES, 16)
                adapters[digest] = PlacedAdapter(num_bytes, rank, demand, pins.get(digest, ()))
            if step % STEP == 0:
                yield

    def _weights(self, now: float) -> dict[str, float]:
        """Returns the replicas' weights. Those that join before any adapter has a home are all alike. One that joins
        later starts small, and gets its adapters a few at a time."""
        present = self._residency.loads.keys() - self._leaving
        first = not self._homes
        known = {replica_id: self._known_since.get(replica_id, now - WARM_UP_S * first) for replica_id in present}
        self._known_since = known
        return {name: min(1.0, max(NEW_WEIGHT, (now - since) / WARM_UP_S)) for name, since in known.items()}

    def _holders(self, digest: str) -> list[str]:
        holders = self._residency.holders(digest)
        return sorted(holders, key=lambda replica: _TIERS.index(holders[replica]))

    def _publish(self, homes: Homes, adapters: Mapping[str, PlacedAdapter]) -> Iterator[None]:
        before, self._homes = self._homes, homes
        for step, digest in enumerate(before):
            if digest not in homes:
                self._residency.set_placed(digest, Placed())
            if step % STEP == 0:
                yield
        num_homes, moves_before = 0, self.counts.moves
        for step, (digest, homes_now) in enumerate(homes.items()):
            num_homes += len(homes_now)
            homes_before = before.get(digest, ())
            if homes_before != homes_now:
                self.counts.placements += not homes_before
                new = len(set(homes_now).difference(homes_before)) if homes_before else 0
                self.counts.moves += new
                self.counts.moved_bytes += new * adapters[digest].num_bytes
                self._residency.set_placed(digest, Placed(homes_now, adapters[digest].num_bytes))
            if step % STEP == 0:
                yield
        self.counts.placed, self.counts.homes = len(homes), num_homes
        self.counts.rebalances += self.counts.moves > moves_before

    def _read_ahead(self, adapters: Mapping[str, PlacedAdapter]) -> Iterator[None]:
        """Orders reads at further homes that do not have their adapter yet. The first home reads it with the request
        that makes it a home. The adapters with the highest demand per byte come first."""
        several: list[tuple[float, str]] = []
        for step, (digest, homes) in enumerate(self._homes.items()):
            if len(homes) > 1:
                heapq.heappush(several, (-adapters[digest].demand / max(1, adapters[digest].num_bytes), digest))
            if step % STEP == 0:
                yield
        room = {replica_id: ROOM * cpu_loras for replica_id, cpu_loras in self._residency.cpu_loras.items()}
        num_ordered = dict.fromkeys(room, 0)
        while several:
            digest = heapq.heappop(several)[1]
            holders = self._residency.holders(digest)
            for home in self._homes[digest]:
                if home not in room:
                    continue  # It has left during this round.
                room[home] -= 1
                if home not in holders and room[home] >= 0 and num_ordered[home] < READ_AHEAD:
                    num_ordered[home] += 1
                    self.counts.reads_ahead += 1
                    self._prefetch(home, digest)
            yield

"""Chooses the replica that should answer a request: the one where its first token is expected soonest. Free of Ray.

It holds a router's view of the cluster: what is resident where, how busy each replica says it is, what this router
has sent there since, and where placement wants each adapter. benchmarks/placement.py uses the same class.
"""

# R replicas

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from lorafleet.cluster.routing.held_counts import NO_LIMIT, HeldCounts, ReadCosts
from lorafleet.cluster.routing.prefix_table import PrefixTable
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of
from lorafleet.cluster.routing.route import prefix_tokens

Tier = Literal["gpu", "coming", "cpu"]  # coming: requests there wait for it, so it gets a slot next.
MAX_HOLDERS = 8  # Considered for one request, at random if more replicas hold its adapter.
FOR_EVER_S = 1e9
TYPICAL_BYTES = 84_000_000  # Assumed for an adapter that the directory has not described: rank 16 on an 8B.


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load that a replica reports about itself."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0  # Prompt tokens that are not computed yet.
    reading_bytes: int = 0  # Adapters that are or will be read from disk; the directory knows their sizes.
    free_slots: int = 1  # Empty or idle, minus the adapters that wait for one; below 0 is a queue.
    free_places: int = 256  # In the running batch, minus the requests that wait; below 0 is a queue.
    kept_s: float = FOR_EVER_S  # Prompts that were used within this time are still in the prefix cache.
    cpu_loras: int = NO_LIMIT  # Adapters that fit into host memory.


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected costs in seconds. The defaults are those of an 8B model on one H200 (docs/measured.md). Only their
    proportions matter."""

    token_s: float = 1 / 42e3  # For each token of prefill.
    request_s: float = 3e-3  # For each request that runs or waits there already: mostly what all wait later.
    fill_byte_s: float = 1 / 53e9  # For each byte copied from host memory to a slot.
    # For each byte read from disk to host memory for the first time, with digest, checks and packing: 31 ms + 60 ms
    # (1.4 GB/s) for rank 16, as here. Later reads are faster (6 GB/s), but with their cost routing was no better.
    read_byte_s: float = 1 / 0.9e9
    place_s: float = 0.1  # Until a place in a full batch is free, for each request that waits for one.
    slot_s: float = 0.7  # Until a slot is released if all are in use.
    # Until a further one is, for each adapter that waits already. Dozens of slots are released one after another.
    next_slot_s: float = 0.1
    move_s: float = 0.06  # The cost to others of filling a slot: an adapter is evicted and comes back.
    of_reads: ReadCosts = field(default_factory=ReadCosts)  # The costs of reads to others.


@dataclass(slots=True)
class _Replica:
    replica_id: str
    index: int = -1  # In the list of replicas that may be chosen; -1 if this one may not.
    wait_s: float = 0.0  # Before a first token here, without loading the adapter.
    batch_s: float = 0.0  # The part of it that is spent on others' prompts and steps.
    reading_s: float = 0.0  # For reading the adapters that are queued already.
    free_slots: int = 1
    free_places: int = 256
    num_held: int = 0  # Adapters in its host memory and slots.
    num_reads: int = 0  # Adapters that it does not hold and that requests since its last report bring.
    cpu_loras: int = NO_LIMIT
    kept_since_s: float = -FOR_EVER_S  # What was sent before has left the prefix cache.
    coming: set[str] = field(default_factory=set)  # Adapters brought by requests since its last report.


class ReplicaChooser:
    """Ranks replicas for requests. `adapter` is a digest, or a name if no digest is known; "" is the base model."""

    def __init__(
        self, costs: Costs | None = None, seed: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._costs = costs or Costs()
        self._clock = clock
        self._random = random.Random(seed)
        self._known: dict[str, _Replica] = {}
        self._live: list[_Replica] = []
        self._wait_R = np.zeros(0)
        self._slot_R = np.zeros(0)  # Including the wait for a slot.
        self._cold_R = np.zeros(0)  # Including the waits for a slot and for the disk.
        self._held = HeldCounts(0)
        self._rendezvous = Rendezvous({})
        self._tiers: dict[str, dict[str, Tier]] = {}
        self._homes: dict[str, tuple[str, ...]] = {}
        self._num_bytes: dict[str, int] = {}
        self._sent_to: dict[str, list[str]] = {}  # By adapter: the replicas that have it in `coming`.
        self._prefixes = PrefixTable()

    # -- updates from the directory and Serve ---------------------------------------------------------------------

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """Sets the replicas that may be chosen."""
        for replica in self._live:
            replica.index = -1
        self._rendezvous = Rendezvous(dict.fromkeys(replica_ids, 1.0))
        self._live = [self._replica(replica_id) for replica_id in self._rendezvous.replicas]
        for index, replica in enumerate(self._live):
            replica.index = index
        self._wait_R, self._slot_R, self._cold_R = np.zeros((3, len(self._live)))
        self._held = HeldCounts(len(self._live))
        for replica in self._live:
            self._set_wait(replica)
            self._held.set(replica.index, replica.num_held)
            self._set_coming(replica)

    def set_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Records a replica's report. The report includes what was sent there before it."""
        replica, costs = self._replica(replica_id), self._costs
        replica.reading_s = load.reading_bytes * costs.read_byte_s
        replica.free_slots = load.free_slots
        replica.kept_since_s = self._clock() - load.kept_s
        replica.cpu_loras = load.cpu_loras
        self._forget_sent(replica)
        busy = (load.num_running + load.num_waiting) * costs.request_s
        replica.free_places = load.free_places
        replica.batch_s = load.queued_tokens * costs.token_s + busy
        self._set_wait(replica)

    def set_tier(self, replica_id: str, adapter: str, tier: Tier | None) -> None:
        holders = self._tiers.setdefault(adapter, {})
        replica = self._known.get(replica_id) if tier is None else self._replica(replica_id)
        if replica is not None:  # Otherwise it is forgotten already.
            replica.num_held += (tier is not None) - (replica_id in holders)
            if replica.index >= 0:
                self._held.set(replica.index, replica.num_held)
        if tier is None:
            holders.pop(replica_id, None)
            if not holders:
                del self._tiers[adapter]
        else:
            holders[replica_id] = tier

    def set_homes(self, adapter: str, homes: Sequence[str], num_bytes: int) -> None:
        """Records where placement wants an adapter. With empty `homes`, the adapter has not been placed."""
        if homes:
            self._homes[adapter], self._num_bytes[adapter] = tuple(homes), num_bytes
        else:
            self._homes.pop(adapter, None)
            self._num_bytes.pop(adapter, None)

    def forget(self, replica_id: str) -> None:
        """Removes the load of a replica that may not be chosen anymore. set_tier() has removed what it held."""
        replica = self._known.get(replica_id)
        if replica is not None and replica.index < 0:
            self._forget_sent(replica)
            del self._known[replica_id]

    def clear_homes(self) -> None:
        self._homes.clear()
        self._num_bytes.clear()

    def is_held(self, adapter: str) -> bool:
        return adapter in self._tiers

    def holds(self, replica_id: str, adapter: str) -> bool:
        return replica_id in self._tiers.get(adapter, ())

    def is_bringing(self, replica_id: str, adapter: str) -> bool:
        """Returns whether a request sent there since the last report brings the adapter."""
        return replica_id in self._sent_to.get(adapter, ())

    def num_bringing(self, replica_id: str) -> int:
        """Returns the number of adapters that requests sent there since the last report bring, and it lacks."""
        return sum(not self.holds(replica_id, adapter) for adapter in self._replica(replica_id).coming)

    def has_free_place(self, replica_id: str) -> bool:
        """Returns whether a request would find a place in the running batch."""
        return self._replica(replica_id).free_places > 0

    @property
    def replica_ids(self) -> list[str]:
        """The replicas that may be chosen, sorted."""
        return self._rendezvous.replicas

    @property
    def holding(self) -> set[str]:
        """The replicas that hold an adapter and may be chosen."""
        held = {replica_id for holders in self._tiers.values() for replica_id in holders}
        return {replica.replica_id for replica in self._live} & held

    # -- one request ----------------------------------------------------------------------------------------------

    def rank(self, adapter: str, prefixes: Sequence[int] = (), *, by_load: bool = True) -> list[str]:
        """Returns the replicas to try, best first.

        Args:
            prefixes: Hashes of how the prompt begins (Route.prefixes).
            by_load: False while no replica's reports come. An adapter's requests then stay where it is resident.
                Otherwise what has been sent there since would soon count more than its residency, and another
                replica may not know what the name stands for.
        """
        if not self._live:
            return []
        seen = self._prefixes.longest(adapter, prefixes, self._is_kept)
        scores: dict[str, tuple[float, float]] = {}
        for replica in self._candidates(adapter, seen):
            wait_s = replica.wait_s if by_load or not adapter else 0.0
            saved_s = prefix_tokens(seen.get(replica.replica_id, 0)) * self._costs.token_s
            score = wait_s + self._residency_s(adapter, replica) - saved_s
            scores[replica.replica_id] = score, replica.wait_s
        return sorted(scores, key=scores.__getitem__)

    def sent(self, adapter: str, replica_id: str, num_tokens: int, prefixes: Sequence[int] = ()) -> None:
        """Records that a request goes to this replica now. The replica's next report will include it."""
        replica, costs = self._replica(replica_id), self._costs
        num_kept = self._prefixes.put(adapter, prefixes, replica_id, self._clock(), replica.kept_since_s)
        num_tokens = max(0, num_tokens - prefix_tokens(num_kept))
        if adapter and adapter not in replica.coming:
            tier = self._tiers.get(adapter, {}).get(replica_id)
            replica.coming.add(adapter)
            self._sent_to.setdefault(adapter, []).append(replica_id)
            replica.free_slots -= tier in ("cpu", None)
            if tier is None:
                replica.reading_s += self._bytes(adapter) * costs.read_byte_s
                replica.num_reads += 1
                self._set_coming(replica)
        replica.free_places -= 1
        replica.batch_s += num_tokens * costs.token_s + costs.request_s
        self._set_wait(replica)

    def _is_kept(self, replica_id: str, sent_s: float) -> bool:
        replica = self._known.get(replica_id)
        return replica is not None and sent_s >= replica.kept_since_s

    def _candidates(self, adapter: str, seen: Iterable[str]) -> list[_Replica]:
        """Returns the replicas that are worth comparing:
        - those that hold the adapter, or have been sent requests that bring it,
        - those where placement wants it,
        - those that have seen how the prompt begins,
        - the least busy of all,
        - its rendezvous home, if there is none of the first three,
        - the one that can read it soon and holds few others, if nobody holds it and placement has no home for it.
        """
        ids = [*self._tiers.get(adapter, ()), *self._sent_to.get(adapter, ())]
        if len(ids) > MAX_HOLDERS:
            ids = self._random.sample(ids, MAX_HOLDERS)
        ids += self._homes.get(adapter, ())
        ids += seen
        known = self._known
        found = [known[name] for name in ids if name in known and known[name].index >= 0]
        if adapter and not found:
            found.append(self._live[self._rendezvous.home(key_of(adapter))])
        if adapter and adapter not in self._tiers and adapter not in self._homes:
            found.append(self._live[self._held.best(self._cold_R, self._costs.of_reads)])
        waits_R = self._slot_R if adapter else self._wait_R
        found.append(self._live[int(waits_R.argmin())])
        return found

    def _residency_s(self, adapter: str, replica: _Replica) -> float:
        """Returns the seconds added to the first token because the adapter is not in a slot there."""
        if not adapter:
            return 0.0
        tier = self._tiers.get(adapter, {}).get(replica.replica_id)
        if tier == "gpu":
            return 0.0
        costs, num_bytes = self._costs, self._bytes(adapter)
        slot_s = num_bytes * costs.fill_byte_s
        if tier == "coming" or adapter in replica.coming:
            return slot_s
        slot_s += costs.move_s + self._slot_wait_s(replica)
        if tier == "cpu":
            return slot_s
        others_s = self._held.cost_s(replica.index, costs.of_reads)
        return slot_s + replica.reading_s + others_s + num_bytes * costs.read_byte_s

    def _slot_wait_s(self, replica: _Replica) -> float:
        if replica.free_slots > 0:
            return 0.0
        return self._costs.slot_s - self._costs.next_slot_s * replica.free_slots

    def _bytes(self, adapter: str) -> int:
        return self._num_bytes.get(adapter, TYPICAL_BYTES)

    def _replica(self, replica_id: str) -> _Replica:
        return self._known.setdefault(replica_id, _Replica(replica_id))

    def _forget_sent(self, replica: _Replica) -> None:
        for adapter in replica.coming:
            self._sent_to[adapter].remove(replica.replica_id)
            if not self._sent_to[adapter]:
                del self._sent_to[adapter]
        replica.coming.clear()
        replica.num_reads = 0
        self._set_coming(replica)

    def _set_coming(self, replica: _Replica) -> None:
        if replica.index >= 0:
            self._held.set_coming(replica.index, replica.num_reads, replica.cpu_loras)

    def _set_wait(self, replica: _Replica) -> None:
        replica.wait_s = replica.batch_s + max(0, 1 - replica.free_places) * self._costs.place_s
        if replica.index >= 0:
            self._wait_R[replica.index] = replica.wait_s
            self._slot_R[replica.index] = slot_s = replica.wait_s + self._slot_wait_s(replica)
            self._cold_R[replica.index] = slot_s + replica.reading_s

"""Implements the routing rules of other servers, so that a fleet can be compared with them under the same engine.

They see the same reports as ReplicaChooser, whose bookkeeping they share, and choose without its estimate of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad, Tier
from lorafleet.cluster.routing.rule_names import RoutingRule


class SimpleRule(ReplicaChooser):
    """A rule that regards neither what prompts share nor how old the reports are."""

    def rank(
        self,
        adapter: str,
        prefixes: Sequence[int] = (),  # noqa: ARG002
        *,
        by_load: bool = True,  # noqa: ARG002
    ) -> list[str]:
        return self._order(adapter)

    def sent(self, adapter: str, replica_id: str, num_tokens: int, prefixes: Sequence[int] = ()) -> None:  # noqa: ARG002
        super().sent(adapter, replica_id, num_tokens)

    def _order(self, adapter: str) -> list[str]:
        raise NotImplementedError


class RoundRobin(SimpleRule):
    """Takes the replicas in turn. Each router has a turn of its own."""

    _turn = -1

    def _order(self, adapter: str) -> list[str]:  # noqa: ARG002
        names = self.replica_ids
        if not names:
            return []
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn :] + names[: self._turn]


class PowerOfTwo(SimpleRule):
    """Draws two replicas and takes the one with fewer requests, as Ray Serve does by default.

    A replica's requests are those of its last report and those that this router has sent since. Source: Mitzenmacher,
    The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self._num_requests = Counter[str]()

    def set_load(self, replica_id: str, load: ReplicaLoad) -> None:
        super().set_load(replica_id, load)
        self._num_requests[replica_id] = load.num_running + load.num_waiting

    def forget(self, replica_id: str) -> None:
        super().forget(replica_id)
        if replica_id not in self.replica_ids:
            self._num_requests.pop(replica_id, None)

    def sent(self, adapter: str, replica_id: str, num_tokens: int, prefixes: Sequence[int] = ()) -> None:
        super().sent(adapter, replica_id, num_tokens, prefixes)
        self._num_requests[replica_id] += 1

    def _order(self, adapter: str) -> list[str]:  # noqa: ARG002
        return self._drawn(self.replica_ids)

    def _drawn(self, names: Iterable[str]) -> list[str]:
        """Returns the names in a random order, but the better of the first two first."""
        drawn = list(names)
        self._random.shuffle(drawn)
        drawn[:2] = sorted(drawn[:2], key=self._num_requests.__getitem__)
        return drawn


class Sticky(PowerOfTwo):
    """Stays with the replicas that hold the adapter, as Ray Serve's model multiplexing does.

    Among these it takes the power of two. If none of them has a free place in its batch, those that hold the fewest
    adapters follow. Ray's routers learn late what they have just sent where; this one knows at once. Requests for the
    base model are spread by the power of two.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._num_held = Counter[str]()

    def set_tier(self, replica_id: str, adapter: str, tier: Tier | None) -> None:
        self._num_held[replica_id] -= self.holds(replica_id, adapter)
        super().set_tier(replica_id, adapter, tier)
        self._num_held[replica_id] += tier is not None

    def _order(self, adapter: str) -> list[str]:
        names = self.replica_ids
        if not adapter or not names:
            return self._drawn(names)
        accepting = [name for name in names if self.has_free_place(name)] or names
        holders = [name for name in accepting if self.holds(name, adapter) or self.is_bringing(name, adapter)]
        fewest = min(map(self._num_adapters, accepting))
        few = [name for name in accepting if self._num_adapters(name) == fewest]
        return list(dict.fromkeys([*self._drawn(holders), *self._drawn(few), *self._drawn(names)]))

    def _num_adapters(self, replica_id: str) -> int:
        return self._num_held[replica_id] + self.num_bringing(replica_id)


def make_chooser(rule: RoutingRule, seed: int | None = None) -> ReplicaChooser:
    match rule:
        case "affinity":
            return ReplicaChooser(seed=seed)
        case "sticky":
            return Sticky(seed)
        case "power-of-two":
            return PowerOfTwo(seed)
        case "round-robin":
            return RoundRobin(seed=seed)

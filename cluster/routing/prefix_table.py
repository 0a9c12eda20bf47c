"""Remembers to which replicas the beginnings of prompts were sent, so that what they share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lorafleet.protocol.lru_cache import LRUCache

MAX_PREFIXES = 100_000  # A prompt of 128 KiB has 29 of them.
MAX_SEEN = 3  # Replicas remembered for each prefix: those that were sent it last.

Seen = tuple[str, float]  # A replica, and the time at which it was sent the prefix last.


class PrefixTable:
    """A bounded table of prefixes. A prefix belongs to one adapter, since other weights give other keys and values."""

    def __init__(self) -> None:
        self._seen: LRUCache[tuple[str, int], tuple[Seen, ...]] = LRUCache(MAX_PREFIXES)

    def put(self, adapter: str, prefixes: Sequence[int], replica_id: str, now: float, kept_since_s: float) -> int:
        """Records that the replica is sent a prompt with these prefixes, shortest first.

        Returns how many of them it had already been sent at `kept_since_s` or later.
        """
        num_kept = 0
        for count, prefix in enumerate(prefixes, 1):
            others: list[Seen] = []
            for seen in self._seen.get((adapter, prefix)) or ():
                if seen[0] != replica_id:
                    others.append(seen)
                elif seen[1] >= kept_since_s:
                    num_kept = count
            self._seen.put((adapter, prefix), ((replica_id, now), *others)[:MAX_SEEN])
        return num_kept

    def longest(self, adapter: str, prefixes: Sequence[int], is_kept: Callable[[str, float], bool]) -> dict[str, int]:
        """Returns how many of the prefixes each replica has seen, for those that have seen any.

        Args:
            is_kept: Returns whether a replica still has what it was sent at a time.
        """
        found: dict[str, int] = {}
        for count in range(len(prefixes), 0, -1):
            for replica_id, sent_s in self._seen.get((adapter, prefixes[count - 1])) or ():
                if replica_id not in found and is_kept(replica_id, sent_s):
                    found[replica_id] = count
        return found

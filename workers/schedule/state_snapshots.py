"""Records which snapshot slots hold which states of recurrent layers (workers/device/state_cache.py has the tensors).

A snapshot is the state of all recurrent layers behind a full KV block. It belongs to the node of that block
(kv_cache.py), which stands for the owner and all tokens up to there. So whoever may share the keys and values may share
the state, and nobody else. The least recently used snapshot is replaced first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence


class StateSnapshots:
    """The snapshot slots of an engine. A slot is free, reserved for a copy, or holds the state behind a node."""

    def __init__(self, slots: range) -> None:
        assert slots
        self.num_slots = len(slots)
        # Called with the node and the slot of a snapshot that is evicted, and whose content is still there.
        self.on_evict: Callable[[int, int], None] | None = None
        self._free = list(slots)[::-1]
        self._slots: OrderedDict[int, int] = OrderedDict()  # Slot of each node, the least recently used first.
        self._pins: Counter[int] = Counter()  # Number of sequences that will resume from a node's snapshot.

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def num_resumable(self, nodes: Sequence[int]) -> int:
        """Returns the length of the longest part of a chain of nodes behind which there is a snapshot."""
        return next((count for count in range(len(nodes), 0, -1) if nodes[count - 1] in self._slots), 0)

    def pin(self, node: int) -> int:
        """Returns the slot of a node's snapshot, which stays there until unpin()."""
        self._pins[node] += 1
        self._slots.move_to_end(node)
        return self._slots[node]

    def unpin(self, node: int) -> None:
        self._pins[node] -= 1
        if not self._pins[node]:
            del self._pins[node]

    def reserve(self) -> int | None:
        """Returns a slot for a new snapshot, or None if all are reserved or pinned. Return it with publish() or
        give_back()."""
        if not self._free:
            oldest = next((node for node in self._slots if node not in self._pins), None)
            if oldest is None:
                return None
            self.evict(oldest)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def publish(self, slot: int, node: int) -> None:
        """Makes a reserved slot the snapshot of a node. If the node has one already, that one stays."""
        if node in self._slots:
            self._slots.move_to_end(node)
            self.give_back(slot)
        else:
            self._slots[node] = slot

    def evict(self, node: int) -> None:
        """Forgets a node's snapshot for lack of room, so that a lower tier may take it."""
        if self.on_evict is not None and node in self._slots and node not in self._pins:
            self.on_evict(node, self._slots[node])
        self.forget(node)

    def forget(self, node: int) -> None:
        """Frees the slot of a node's snapshot, if it has one that nobody will resume from."""
        if node in self._slots and node not in self._pins:
            self.give_back(self._slots.pop(node))

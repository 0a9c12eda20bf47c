"""Which things changed after a version, each once: for those who poll and are a little behind. What they changed to is
for the caller to look up."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RecentChanges(Generic[K]):
    """What changes again takes the place of its earlier change: else the busiest thing would push out all others."""

    def __init__(self) -> None:
        self.forgotten = 0  # who is not as far misses changes
        self._versions: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._versions)

    def note(self, key: K, version: int) -> None:
        """Versions never fall."""
        self._versions[key] = version
        self._versions.move_to_end(key)

    def shrink(self, most: int) -> None:
        """Forgets what changed longest ago."""
        while len(self._versions) > most:
            _, self.forgotten = self._versions.popitem(last=False)

    def since(self, version: int) -> Iterator[K]:
        """What changed after `version`, which is not before `forgotten`; the last one first."""
        return itertools.takewhile(lambda key: self._versions[key] > version, reversed(self._versions))

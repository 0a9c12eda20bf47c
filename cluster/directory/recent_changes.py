"""Records which things changed after a version, each once, for pollers that are a little behind. The caller looks up
what they changed to."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RecentChanges(Generic[K]):
    """A record of changes. A new change of a key replaces its earlier one; otherwise the busiest key would push out all
    others."""

    def __init__(self) -> None:
        self.forgotten = 0  # A poller at an earlier version misses changes.
        self._versions: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._versions)

    def record(self, key: K, version: int) -> None:
        """Records a change of the key. The version must not be lower than the last one."""
        self._versions[key] = version
        self._versions.move_to_end(key)

    def shrink(self, most: int) -> None:
        """Drops the oldest changes until at most `most` are left."""
        while len(self._versions) > most:
            _, self.forgotten = self._versions.popitem(last=False)

    def since(self, version: int) -> Iterator[K]:
        """Returns the keys that changed after `version`, the last one first. `version` must not be before
        `forgotten`."""
        return itertools.takewhile(lambda key: self._versions[key] > version, reversed(self._versions))

"""Gathers changes until they are published, all together, under one version."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from lorafleet.cluster.directory.recent_changes import RecentChanges

K = TypeVar("K", bound=Hashable)


class PublishedChanges(Generic[K]):
    """Counts up a version with each change, and publishes the latest one from time to time."""

    def __init__(self) -> None:
        self.version = 0  # The version that is published; later changes wait for publish().
        self._latest = 0
        self._latest_urgent = 0  # The version of the last urgent change.
        self._unpublished: dict[K, None] = {}
        self._recent = RecentChanges[K]()  # By the version that published them last.

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def has_unpublished(self) -> bool:
        return self.version < self._latest

    @property
    def is_urgent(self) -> bool:
        """Whether there is an unpublished change that cannot wait."""
        return self.version < self._latest_urgent

    def record(self, key: K, *, is_urgent: bool) -> None:
        self._latest += 1
        if is_urgent:
            self._latest_urgent = self._latest
        self._unpublished[key] = None

    def publish(self, most: int) -> None:
        """Publishes all changes so far. Forgets the oldest changes beyond `most`."""
        self.version = self._latest
        for key in self._unpublished:
            self._recent.record(key, self.version)
        self._unpublished = {}
        self._recent.shrink(most)

    def reaches_back_to(self, version: int) -> bool:
        """Returns whether since() knows all published changes after this version."""
        return self._recent.forgotten <= version <= self.version

    def since(self, version: int) -> Iterator[K]:
        """Returns the keys that changed after `version`, the last one first."""
        return self._recent.since(version)

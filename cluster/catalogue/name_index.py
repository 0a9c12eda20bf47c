"""An ordered index of names, which finds a page without looking at the other names."""

from __future__ import annotations

import bisect


class NameIndex:
    """A sorted list of names. They may be added by the million before the first page is read; then each costs a move
    within the list."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._is_sorted = False

    def __len__(self) -> int:
        return len(self._names)

    def sort(self) -> None:
        if not self._is_sorted:
            self._names.sort()
            self._is_sorted = True

    def add(self, name: str) -> None:
        """Adds a name that is not in the index yet."""
        if self._is_sorted:
            bisect.insort(self._names, name)
        else:
            self._names.append(name)

    def remove(self, name: str) -> None:
        """Removes a name, which must be in the index."""
        self.sort()
        del self._names[bisect.bisect_left(self._names, name)]

    def between(self, after: str, end: str, limit: int) -> list[str]:
        """Returns the first `limit` names that are greater than `after` and less than `end`."""
        self.sort()
        start = bisect.bisect_right(self._names, after)
        stop = bisect.bisect_left(self._names, end, start)
        return self._names[start : min(stop, start + limit)]

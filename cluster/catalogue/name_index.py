"""Names in order, of which a page is found without looking at the others."""

from __future__ import annotations

import bisect


class NameIndex:
    """Names may be added by the million before the first page is asked for; then each costs a move within a list."""

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
        """The name must not be there yet."""
        if self._is_sorted:
            bisect.insort(self._names, name)
        else:
            self._names.append(name)

    def remove(self, name: str) -> None:
        """The name must be there."""
        self.sort()
        del self._names[bisect.bisect_left(self._names, name)]

    def between(self, after: str, end: str, limit: int) -> list[str]:
        """The first names that are greater than `after` and less than `end`."""
        self.sort()
        start = bisect.bisect_right(self._names, after)
        stop = bisect.bisect_left(self._names, end, start)
        return self._names[start : min(stop, start + limit)]

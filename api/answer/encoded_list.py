"""A JSON list that is encoded entry by entry, so that no encoder call holds the GIL for a whole long answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class EncodedList:
    """A list whose items are encoded once when they are added, and then only copied."""

    def __init__(self, items: Iterable[object] = ()) -> None:
        self._items = bytearray()
        for item in items:
            self.append(item)

    def append(self, item: object) -> None:
        self._items += (b"," if self._items else b"") + msgspec.json.encode(item)

    @property
    def encoded(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + bytes(self._items) + b"]")

"""Stores the responses that one replica has generated, with bounds on their number, their bytes and their age.

Owners share the store: if it is full, the owner that has most loses its oldest response. Responses are in memory only,
so they end with their replica.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.api.stored.background_run import BackgroundRun

MAX_STORED_RESPONSES = 10_000  # On one replica.
MAX_STORED_S = 24 * 3600.0
_OVERHEAD_BYTES = 1024  # The objects of an entry take about so much.


@dataclass(slots=True)
class StoredResponse:
    response_id: str
    owner: str  # See Caller.owner.
    history: bytes  # JSON list of the items of the conversation before this response's own input; empty if none.
    own_input: bytes  # JSON list of the items of the request's own input.
    content: bytes = b""  # JSON of the response; empty while it is generated.
    run: BackgroundRun | None = None  # Generates the response in the background, or has done so.
    streams: bool = False  # Whether the events of the run are for clients.
    stored_s: float = 0.0
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.run is not None and self.run.is_running

    def measure(self) -> int:
        """Returns the bytes of the entry. It takes the same time however long the answer is."""
        running = (
            0 if self.run is None else self.run.num_event_bytes + (0 if self.content else self.run.answer.num_bytes)
        )
        return _OVERHEAD_BYTES + len(self.history) + len(self.own_input) + len(self.content) + running


class _Shelf:
    """The responses of one owner, the oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def add(self, entry: StoredResponse) -> None:
        entry.num_bytes = entry.measure()
        self.entries[entry.response_id] = entry
        self.num_bytes += entry.num_bytes

    def count_anew(self, entry: StoredResponse) -> None:
        num_bytes = entry.measure()
        self.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def pop(self, response_id: str) -> StoredResponse | None:
        entry = self.entries.pop(response_id, None)
        self.num_bytes -= 0 if entry is None else entry.num_bytes
        return entry

    def oldest(self) -> StoredResponse | None:
        """Returns the oldest response that has ended."""
        return next((entry for entry in self.entries.values() if not entry.is_running), None)


class ResponseStore:
    """The responses of all owners.

    Args:
        max_bytes: 0 stores nothing. Responses that are being generated count with what they have so far, and are not
            evicted; those of one owner may have half of this.
    """

    def __init__(
        self,
        max_bytes: int,
        max_entries: int = MAX_STORED_RESPONSES,
        max_age_s: float = MAX_STORED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def put(self, entry: StoredResponse) -> None:
        """Stores a response, or counts its bytes anew when it has ended. One that is too large is not stored."""
        shelf = self._shelves.setdefault(entry.owner, _Shelf())
        replaced = shelf.pop(entry.response_id)
        if replaced is not entry:
            entry.stored_s = self._clock()
        shelf.add(entry)
        self._drop_expired()
        self._shrink(lambda shelf: shelf.num_bytes, self.max_bytes)
        self._shrink(lambda shelf: len(shelf.entries), self._max_entries)

    def fits(self, entry: StoredResponse) -> bool:
        """Counts the bytes of a response that is being generated anew, and drops older ones to make room for it.

        Returns False if it does not fit beside the other responses that are being generated.
        """
        shelf = self._shelves.get(entry.owner)
        if shelf is None or shelf.entries.get(entry.response_id) is not entry:
            return True  # It was deleted, and its run is about to end.
        shelf.count_anew(entry)
        while shelf.num_bytes > self.max_bytes // 2 and (oldest := shelf.oldest()) is not None:
            shelf.pop(oldest.response_id)
        self._shrink(lambda shelf: shelf.num_bytes, self.max_bytes)
        return shelf.num_bytes <= self.max_bytes // 2 and self._num_bytes() <= self.max_bytes

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.entries.get(response_id)

    def pop(self, owner: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.pop(response_id)
        if shelf is not None and not shelf.entries:
            del self._shelves[owner]
        return entry

    def _num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def _drop_expired(self) -> None:
        before_s = self._clock() - self._max_age_s
        for shelf in list(self._shelves.values()):
            while (oldest := shelf.oldest()) is not None and oldest.stored_s < before_s:
                self.pop(oldest.owner, oldest.response_id)

    def _shrink(self, size: Callable[[_Shelf], int], bound: int) -> None:
        """Drops the oldest responses of the owners that have most, until all owners together are within the bound."""
        while sum(map(size, self._shelves.values())) > bound:
            candidates = [(size(shelf), oldest) for shelf in self._shelves.values() if (oldest := shelf.oldest())]
            if not candidates:
                return
            _, oldest = max(candidates, key=lambda candidate: candidate[0])
            self.pop(oldest.owner, oldest.response_id)

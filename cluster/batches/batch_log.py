"""The log of one batch: numbered objects that are created once, each with the batch's stage and the answers since the
one before.

A writer creates the next number, and fails if another writer was first. So two processes that both believe they run a
batch cannot answer a line twice, and a cancellation is one more entry. See catalogue_log.py for the same idea.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from lorafleet.cluster.batches.batch_records import BatchStage
from lorafleet.cluster.catalogue.catalogue_store import Store


@dataclass(frozen=True, slots=True)
class LogEntry:
    number: int  # From 1.
    stage: BatchStage
    answers: bytes  # Lines of the output's format.

    def encode(self) -> bytes:
        return msgspec.json.encode(self.stage) + b"\n" + self.answers


class BatchLog:
    def __init__(self, store: Store, batch_id: str) -> None:
        self._store = store
        self._batch_id = batch_id

    def append(self, entry: LogEntry) -> bool:
        """Returns whether the entry is in the log. It is not if its number is taken by another one.

        An entry whose first attempt was not acknowledged is found in the log by the second, and is the same then.
        """
        content = entry.encode()
        return self._store.create(self._key(entry.number), content) or self._store.read(self._key(entry.number)) == (
            content
        )

    def read(self, number: int) -> LogEntry | None:
        content = self._store.read(self._key(number))
        if content is None:
            return None
        head, _, answers = content.partition(b"\n")
        return LogEntry(number, msgspec.json.decode(head, type=BatchStage), answers)

    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        """Yields the entries in order."""
        while (entry := self.read(after + 1)) is not None:
            yield entry
            after += 1

    def last(self) -> LogEntry | None:
        """Returns the last entry. It doubles the number until there is no such entry, and then halves the interval."""
        found, missing = self.read(1), 2
        if found is None:
            return None
        while (further := self.read(missing)) is not None:
            found, missing = further, 2 * missing
        while found.number + 1 < missing:
            middle = (found.number + missing) // 2
            entry = self.read(middle)
            found, missing = (found, middle) if entry is None else (entry, missing)
        return found

    def delete(self) -> None:
        """Deletes all entries, the last one first, so that last() finds those that remain after a crash. An entry that
        another process adds meanwhile may have none before it."""
        keys = self._store.keys(f"batch-log/{self._batch_id}.")
        for key in sorted(keys, key=lambda key: int(key.rpartition(".")[2]), reverse=True):
            self._store.delete(key)

    def _key(self, number: int) -> str:
        return f"batch-log/{self._batch_id}.{number}"

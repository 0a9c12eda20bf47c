"""Stores batches beside their files (file_store.py), in objects that never change.

    batches/OWNER.BATCH     the batch as it was created
    open/OWNER.BATCH        exists until the batch has ended; these are what there is to do
    batch-log/BATCH.NUMBER  what has happened so far (batch_log.py); deleted when the batch has ended
    ends/BATCH              how the batch ended

The calls block. Callers run them in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lorafleet.cluster.batches.batch_bounds import BATCH_LIVES_S
from lorafleet.cluster.batches.batch_log import BatchLog, LogEntry
from lorafleet.cluster.batches.batch_quota import BatchQuota
from lorafleet.cluster.batches.batch_records import BatchRecord, BatchStage, id_time_s
from lorafleet.cluster.batches.file_store import ABANDONED_S, BatchFiles
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.steady_clock import SteadyClock
from lorafleet.protocol.errors import Forbidden, InvalidRequest


@dataclass(frozen=True, slots=True)
class BatchName:
    owner: str
    batch_id: str


class BatchStore:
    """The batches of all tenants, `files`, and the `quota` of both.

    Args:
        most_bytes: Returns the bytes that all files may have.
        clock: Seconds since 1970, the same on all nodes. None stands for a SteadyClock.
    """

    def __init__(self, store: Store, most_bytes: Callable[[], int], clock: Callable[[], float] | None = None) -> None:
        self.clock = SteadyClock() if clock is None else clock
        self.files = BatchFiles(store, self.clock)
        self.quota = BatchQuota(self.files, most_bytes)
        self._store = store

    def add(self, record: BatchRecord) -> None:
        """Stores a new batch. If the process ends in between, there is no such batch; care() removes the rest."""
        name = f"{record.owner}.{record.batch_id}"
        self._store.create(f"open/{name}", b"")
        self._store.create(f"batches/{name}", msgspec.json.encode(record))

    def names(self, owner: str = "") -> list[BatchName]:
        """Returns the batches of an owner, or of all, the oldest first."""
        return self._names("batches/", owner)

    def open_names(self, owner: str = "") -> list[BatchName]:
        """Returns those that have not ended."""
        return self._names("open/", owner)

    def find(self, owner: str, batch_id: str) -> BatchRecord | None:
        content = self._store.read(f"batches/{owner}.{batch_id}")
        return None if content is None else msgspec.json.decode(content, type=BatchRecord)

    def log(self, batch_id: str) -> BatchLog:
        return BatchLog(self._store, batch_id)

    def ended(self, batch_id: str) -> BatchStage | None:
        """Returns the last stage of a batch that has ended, or None."""
        content = self._store.read(f"ends/{batch_id}")
        return None if content is None else msgspec.json.decode(content, type=BatchStage)

    def stage(self, batch_id: str) -> BatchStage:
        """Returns the batch's present stage."""
        ended = self.ended(batch_id)
        if ended is not None:
            return ended
        last = self.log(batch_id).last()
        # The batch may have ended in between, and its log be deleted.
        return self.ended(batch_id) or (BatchStage() if last is None else last.stage)

    def cancel(self, batch_id: str) -> BatchStage:
        """Asks whoever runs the batch to end it, and returns its stage. Raises InvalidRequest if it has ended."""
        log = self.log(batch_id)
        while True:
            # In this order, since the log is deleted once the end is recorded.
            last = log.last() or LogEntry(0, BatchStage(), b"")
            stage = self.ended(batch_id) or last.stage
            if stage.ending is not None and stage.ending != "cancelled":
                raise InvalidRequest(
                    f"The batch cannot be cancelled, since its status is {stage.status!r}.", "batch_id"
                )
            if stage.status in ("cancelling", "cancelled"):
                return stage
            now_s = int(self.clock())
            stage = msgspec.structs.replace(stage, status="cancelling", cancelling_s=now_s, writer="")
            if log.append(LogEntry(last.number + 1, stage, b"")):
                if self.ended(batch_id) is None:
                    return stage
                log.delete()  # The batch ended before this entry was written, so nobody will read it.

    def end(self, record: BatchRecord, stage: BatchStage) -> None:
        """Records how the batch ended, and deletes what was needed until then. Doing it again changes nothing."""
        self._store.create(f"ends/{record.batch_id}", msgspec.json.encode(stage))
        self._store.delete(f"open/{record.owner}.{record.batch_id}")
        self.log(record.batch_id).delete()

    def drop_oldest(self, owner: str, most: int) -> bool:
        """Deletes batches of an owner that have ended, the oldest first, until it has fewer than `most`. Returns
        whether that was possible."""
        names, open_names = self.names(owner), set(self.open_names(owner))
        ended = [name for name in names if name not in open_names]
        too_many = max(0, len(names) - most + 1)
        for name in ended[:too_many]:
            self._delete(name)
        return too_many <= len(ended)

    def care(self) -> None:
        """Deletes what has expired or was left behind."""
        names, open_names = self.names(), set(self.open_names())
        for name in names:
            if name not in open_names and id_time_s(name.batch_id) < self.clock() - BATCH_LIVES_S:
                self._delete(name)
        for name in open_names.difference(names):
            if id_time_s(name.batch_id) < self.clock() - ABANDONED_S:
                self._store.delete(f"open/{name.owner}.{name.batch_id}")
        for batch_id in {key.removeprefix("batch-log/").partition(".")[0] for key in self._store.keys("batch-log/")}:
            if self.ended(batch_id) is not None:
                self.log(batch_id).delete()
        running = [self.find(name.owner, name.batch_id) for name in open_names]
        self.files.care({record.input_file_id for record in running if record is not None})

    def _delete(self, name: BatchName) -> None:
        self._store.delete(f"batches/{name.owner}.{name.batch_id}")
        self._store.delete(f"ends/{name.batch_id}")

    def _names(self, folder: str, owner: str) -> list[BatchName]:
        keys = self._store.keys(f"{folder}{owner}." if owner else folder)
        found = [BatchName(*key.removeprefix(folder).split(".")) for key in keys]
        return sorted(found, key=lambda name: name.batch_id)


def needed(store: BatchStore | None) -> BatchStore:
    """Returns the store itself. Raises Forbidden if the server was started without one."""
    if store is None:
        raise Forbidden(
            "Files and batches are off: this server was started without --batch-store. Start it with --batch-store "
            "FOLDER or --batch-store s3://bucket/prefix."
        )
    return store

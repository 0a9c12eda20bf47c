"""Limits the bytes and the number of files that an owner, and all owners together, have in the batch store: inputs and
outputs alike."""

from __future__ import annotations

from collections.abc import Callable

from lorafleet.api.access.caller import Caller, whose
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_records import owner_of
from lorafleet.cluster.batches.file_store import BatchFiles
from lorafleet.protocol.errors import QuotaExceeded


class BatchQuota:
    """The limits of one store. Its calls block.

    Args:
        most_bytes: Returns the bytes of all files (--batch-store-bytes), which may change. One owner may have a share
            of them.
    """

    def __init__(self, files: BatchFiles, most_bytes: Callable[[], int]) -> None:
        self._files = files
        self._most_bytes = most_bytes

    @property
    def _max_bytes(self) -> int:
        return self._most_bytes()

    @property
    def _most_of_one(self) -> int:
        return int(bounds.MAX_BYTES_OF_ONE * self._most_bytes())

    def check_upload(self, caller: Caller, num_bytes: int) -> None:
        """Raises QuotaExceeded if the caller, or all callers together, would have too many files or bytes. Uploads at
        the same time do not see each other, so they may exceed the bounds once."""
        names, owner = self._files.names(), owner_of(caller)
        own = [name for name in names if name.owner == owner]
        of_one = sum(name.num_bytes for name in own)
        if len(own) >= bounds.MAX_FILES_OF_ONE:
            raise QuotaExceeded(
                f"{whose(caller)} has {len(own)} files; at most {bounds.MAX_FILES_OF_ONE} are allowed. Delete some."
            )
        if of_one + num_bytes > self._most_of_one:
            raise QuotaExceeded(
                f"The files of {whose(caller)} would have {of_one + num_bytes} bytes; at most {self._most_of_one} are "
                "allowed. Delete files that are not needed, or ask the operator to raise --batch-store-bytes."
            )
        if sum(name.num_bytes for name in names) + num_bytes > self._max_bytes:
            raise QuotaExceeded(
                f"The files of all tenants would have more than {self._max_bytes} bytes. Ask the operator to raise "
                "--batch-store-bytes, or try again when files have expired."
            )

    def check_batch(self, caller: Caller) -> None:
        """Raises QuotaExceeded if there is no room for any output of a new batch."""
        if not self.left(owner_of(caller)):
            raise QuotaExceeded(
                f"The files of {whose(caller)} leave no room for the output of a batch; at most {self._most_of_one} "
                f"bytes are allowed, and {self._max_bytes} for all tenants. Delete files that are not needed, or ask "
                "the operator to raise --batch-store-bytes."
            )

    def left(self, owner: str) -> int:
        """Returns the bytes that the owner's files may still have. Batches that run at the same time do not see each
        other's output."""
        names = self._files.names()
        of_one = sum(name.num_bytes for name in names if name.owner == owner)
        of_all = sum(name.num_bytes for name in names)
        return max(0, min(self._most_of_one - of_one, self._max_bytes - of_all))

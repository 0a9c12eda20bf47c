"""Logs who administered what, when, from where and with what outcome, as lines of JSON. A call waits for its lines
to be on the disk.

A call that acts has two lines: one before it acts, and one with its outcome before it is answered. A call that is
rejected before it acts has only the second. The lines contain names, but never keys or bodies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.api.access.audit import Audited
from lorafleet.cluster.tenancy.line_file import LineFile
from lorafleet.protocol.errors import LogUnwritable

MAX_REFUSALS_PER_MINUTE = 60  # Lines of rejected calls, for each key, and for all callers without a known key together.


class AuditLog(Collector):
    def __init__(self, folder: Path, replica_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the log's first file. Raises ConfigError if the folder cannot be written."""
        self._lines = DurableLines(LineFile(folder, f"audit-{replica_id}"))
        self._clock = clock
        self._refusals: dict[str, _Refusals] = {}  # By key, as many as files of keys had, and "".
        self._num_unlogged = 0

    async def acted(self, entry: Audited) -> None:
        await self._lines.append(msgspec.json.encode(entry))

    async def refused(self, entry: Audited) -> None:
        """Logs a rejected call, unless the key has too many: a caller that is rejected in a loop must neither fill
        the disk nor keep it busy."""
        refusals = self._refusals.setdefault(entry.key_mark, _Refusals())
        if not refusals.may_log(self._clock()):
            refusals.num_unlogged += 1
            self._num_unlogged += 1
            return
        unlogged, refusals.num_unlogged = refusals.num_unlogged, 0
        await self._lines.append(msgspec.json.encode(msgspec.structs.replace(entry, unlogged=unlogged)))

    def close(self) -> None:
        self._lines.close()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "lorafleet_audit_unlogged",
            "Rejected administrative calls without a line of their own, since their key had more than "
            f"{MAX_REFUSALS_PER_MINUTE} in a minute.",
            self._num_unlogged,
        )


class _Refusals:
    """A token bucket of lines for one key. It fills evenly and holds a minute's worth."""

    def __init__(self) -> None:
        self.num_unlogged = 0
        self._level = float(MAX_REFUSALS_PER_MINUTE)
        self._filled_s: float | None = None

    def may_log(self, now_s: float) -> bool:
        since_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        self._level = min(MAX_REFUSALS_PER_MINUTE, self._level + since_s * MAX_REFUSALS_PER_MINUTE / 60)
        if self._level < 1:
            return False
        self._level -= 1
        return True


class DurableLines:
    """Appends lines that are on the disk when append() returns. All waiting lines share one write and one fsync."""

    def __init__(self, file: LineFile) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit-log")  # One, since the file has one writer.
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def append(self, line: bytes) -> None:
        """Appends a line durably. Raises LogUnwritable if it cannot be written; then no part of it is in the file."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._waiting.append((line + b"\n", written))
        if self._committing is None or self._committing.done():
            self._committing = loop.create_task(self._commit())
        await written

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    async def _commit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            error = None
            try:
                await loop.run_in_executor(self._thread, self._file.append_durably, b"".join(line for line, _ in group))
            except OSError as failed:
                error = LogUnwritable(
                    f"The audit log cannot be written: {failed.strerror}. Try again once the operator has freed "
                    "space in --audit-dir."
                )
            for _, written in group:
                if written.done():  # Its caller no longer waits.
                    continue
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)

"""Meters the use of one replica: a line of JSON for each sequence is appended to files of this process's own.

The kernel has a line before the client receives the end of its answer, so a replica that is killed loses only what
was in flight. fsync follows within SYNC_S seconds, so a machine that loses its power loses no more than that. Lines
that cannot be written, as on a full disk, stay in memory and are tried again every SYNC_S seconds. Nothing is ever
dropped: once MAX_UNWRITTEN_BYTES wait, no new sequence begins until the disk has room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.api.access.usage import TenantUsage
from lorafleet.api.access.work_threads import on_duty
from lorafleet.cluster.tenancy.line_file import MAX_FILE_BYTES, LineFile
from lorafleet.protocol.errors import LogUnwritable

SYNC_S = 1.0
MAX_UNWRITTEN_BYTES = 32 << 20  # About 100,000 sequences; those in flight come on top.
CHUNK_LINES = 1024  # Lines that one system call writes.

logger = logging.getLogger("lorafleet.cluster")


class BufferedLines:
    """Writes each line at once if the disk has room, and buffers it otherwise.

    The event loop calls add(), whose cost does not depend on how many lines wait. sync() is called in a thread.
    """

    def __init__(self, file: LineFile) -> None:
        self._file = file
        self._lock = threading.Lock()  # Guards all fields below; it is not held during fsync.
        self._full: list[int] = []  # Files to sync and close.
        self._waiting: deque[bytes] = deque()
        self._unsynced = False
        self.unwritten_bytes = 0
        self.num_sync_failures = 0

    def add(self, line: bytes) -> None:
        with self._lock:
            self._waiting.append(line + b"\n")
            self.unwritten_bytes += len(line) + 1
            if len(self._waiting) == 1:  # While other lines wait, sync() writes all of them.
                self._write_some()

    async def keep_syncing(self) -> None:
        """Calls sync() in a thread every SYNC_S seconds. Never returns."""
        while True:
            await asyncio.sleep(SYNC_S)
            await on_duty(self.sync)

    def sync(self) -> None:
        self._write_all()
        with self._lock:
            files, self._full = self._full, []
            unsynced, self._unsynced = self._file.fd if self._unsynced else None, False
        if unsynced is not None:
            self._fsync(unsynced)
        for file in files:
            self._fsync(file)
            os.close(file)

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _write_all(self) -> None:
        wrote = True
        while wrote:  # The lock is free between two chunks, for add() in the event loop.
            with self._lock:
                wrote = bool(self._waiting) and self._write_some()

    def _write_some(self) -> bool:
        """Writes a chunk of lines, and returns whether that was possible."""
        chunk = b"".join(itertools.islice(self._waiting, CHUNK_LINES))
        try:
            num_written = self._file.write(chunk)
        except OSError as error:
            logger.error("%d bytes of the usage log cannot be written yet: %s", self.unwritten_bytes, error)
            return False
        self._take_off(num_written)
        self._unsynced = True
        whole_lines = num_written == len(chunk)  # No line is split between two files.
        if whole_lines and (full := self._file.next_if_full()) is not None:
            self._full.append(full)
        return True

    def _take_off(self, num_bytes: int) -> None:
        self.unwritten_bytes -= num_bytes
        while num_bytes:
            line = self._waiting.popleft()
            if len(line) > num_bytes:
                self._waiting.appendleft(line[num_bytes:])
            num_bytes -= min(num_bytes, len(line))

    def _fsync(self, file: int) -> None:
        try:
            os.fsync(file)
        except OSError as error:
            self.num_sync_failures += 1
            logger.error("lines of the usage log may be lost in a power failure, since fsync failed: %s", error)


class UsageLog(Collector):
    def __init__(
        self,
        folder: Path,
        replica_id: str,
        max_unwritten_bytes: int = MAX_UNWRITTEN_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Creates the log's first file. Raises ConfigError if the folder cannot be written."""
        self.lines = BufferedLines(LineFile(folder, f"usage-{replica_id}", max_file_bytes))
        self._folder, self._max_unwritten_bytes = folder, max_unwritten_bytes
        self._tokens: Counter[tuple[str, str]] = Counter()  # By tenant and kind.
        self._sequences: Counter[str] = Counter()  # By tenant.
        self._num_refused = 0

    def check_room(self) -> None:
        """Raises LogUnwritable while so many bytes are unwritten that no new sequence may begin."""
        if self.lines.unwritten_bytes < self._max_unwritten_bytes:
            return
        self._num_refused += 1
        raise LogUnwritable(
            f"The usage log cannot be written: {self.lines.unwritten_bytes} bytes are waiting, and at most "
            f"{self._max_unwritten_bytes} may wait. Requests that cannot be metered are rejected. Try again once the "
            "operator has freed space in --usage-dir."
        )

    def add(self, usage: TenantUsage) -> None:
        self.lines.add(msgspec.json.encode(usage))
        self._sequences[usage.tenant] += 1
        for kind in ("prompt", "cached", "completion"):
            self._tokens[usage.tenant, kind] += getattr(usage, f"{kind}_tokens")

    def collect(self) -> Iterator[Metric]:
        sequences = CounterMetricFamily("lorafleet_tenant_sequences", "Sequences that ended.", None, ["tenant"])
        for tenant, count in self._sequences.items():
            sequences.add_metric([tenant], count)
        yield sequences
        tokens = CounterMetricFamily(
            "lorafleet_tenant_tokens",
            "Tokens of a tenant's requests by kind: prompt, cached (those of the prompt that were cached), completion.",
            None,
            ["tenant", "kind"],
        )
        for (tenant, kind), count in self._tokens.items():
            tokens.add_metric([tenant, kind], count)
        yield tokens
        yield GaugeMetricFamily(
            "lorafleet_usage_unwritten_bytes",
            "Bytes of the usage log that could not be written yet.",
            self.lines.unwritten_bytes,
        )
        yield CounterMetricFamily(
            "lorafleet_usage_refused",
            "Requests that were rejected because too much of the usage log could not be written.",
            self._num_refused,
        )
        yield CounterMetricFamily(
            "lorafleet_usage_sync_failures",
            "Failed fsyncs of the usage log; a power failure may lose the lines of each.",
            self.lines.num_sync_failures,
        )

"""The metering of one replica: a line of JSON for each sequence, appended to files of this process's own.

A line is with the kernel before the client hears the end of its answer: a replica that is killed loses only what was
under way. fsync follows within SYNC_S, so a machine that loses its power loses no more than that. What cannot be
written, as on a full disk, is kept and tried again with the next line; a metric says how much waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.workers.errors import ConfigError
from lorafleet.workers.openai.usage import Usage

SYNC_S = 1.0
MAX_FILE_BYTES = 256 << 20  # about a million sequences
SUFFIX = ".jsonl"

logger = logging.getLogger("lorafleet.cluster")


class AppendedLines:
    """Files that only grow, in a folder where several processes have their own; a new one is begun when one is large.
    add() is the event loop's, sync() may be called in a thread."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises ConfigError where nothing can be written."""
        self._folder, self._name = folder, name
        self._lock = threading.Lock()  # of all below; nobody waits for the disk with it
        self._full: list[int] = []  # files to be synced and closed
        self.unwritten = b""
        self._unsynced = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. Give a folder that can, or mend it.") from None

    def add(self, line: bytes) -> None:
        with self._lock:
            self.unwritten += line + b"\n"
            self._write()

    async def keep_syncing(self) -> None:
        """Never ends."""
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self.sync)

    def sync(self) -> None:
        with self._lock:
            self._write()
            full, self._full = self._full, []
            unsynced, self._unsynced = self._unsynced, False
        if unsynced:
            _fsync(self._file)
        for file in full:
            _fsync(file)
            os.close(file)

    def close(self) -> None:
        self.sync()
        os.close(self._file)

    def _open(self) -> int:
        path = self._folder / f"{self._name}-{time.time_ns()}{SUFFIX}"
        self._size = 0
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _write(self) -> None:
        try:
            while self.unwritten:
                num_written = os.write(self._file, self.unwritten)
                self.unwritten = self.unwritten[num_written:]
                self._size += num_written
                self._unsynced = True
            if self._size > MAX_FILE_BYTES:
                before, self._file = self._file, self._open()
                self._full.append(before)
        except OSError as error:
            logger.error("%d bytes cannot be written yet and are kept: %s", len(self.unwritten), error)


def _fsync(file: int) -> None:
    with contextlib.suppress(OSError):  # the next line's write says what is wrong
        os.fsync(file)


class UsageLog(Collector):
    def __init__(self, folder: Path, replica_id: str) -> None:
        self.lines = AppendedLines(folder, f"usage-{replica_id}")
        self._tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind
        self._sequences: Counter[str] = Counter()  # by tenant

    def add(self, usage: Usage) -> None:
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
            "Tokens of a tenant's requests: prompt, those of it that were cached, completion.",
            None,
            ["tenant", "kind"],
        )
        for (tenant, kind), count in self._tokens.items():
            tokens.add_metric([tenant, kind], count)
        yield tokens
        yield GaugeMetricFamily(
            "lorafleet_usage_unwritten_bytes",
            "Of the usage log: what could not be written yet.",
            len(self.lines.unwritten),
        )

"""The metering of one replica: a line of JSON for each sequence, appended to a file of this process's own.

A line is with the kernel before the client hears the end of its answer: a replica that is killed loses only what was
under way. fsync follows within SYNC_S, so a machine that loses its power loses no more than that. What cannot be
written, as on a full disk, is kept and tried again with the next line; a metric says how much waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
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
SUFFIX = ".jsonl"

logger = logging.getLogger("lorafleet.cluster")


class AppendedLines:
    """A file that only grows, in a folder where several processes have one each."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises ConfigError where nothing can be written."""
        path = folder / f"{name}-{time.time_ns()}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. Give a folder that can, or mend it.") from None
        self.unwritten = b""
        self._unsynced = False

    def add(self, line: bytes) -> None:
        self.unwritten += line + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[os.write(self._file, self.unwritten) :]
                self._unsynced = True
        except OSError as error:
            logger.error("%d bytes cannot be written yet and are kept: %s", len(self.unwritten), error)

    async def keep_syncing(self) -> None:
        """Never ends."""
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self.sync)

    def sync(self) -> None:
        if self.unwritten:
            self._write()
        if self._unsynced:
            self._unsynced = False
            with contextlib.suppress(OSError):  # the next line's write says what is wrong
                os.fsync(self._file)

    def close(self) -> None:
        self.sync()
        os.close(self._file)


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

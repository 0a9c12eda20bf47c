"""Brings a remote file's bytes to the disk, in parallel parts. Each part continues where it was interrupted.

This module knows neither where the bytes come from (source.py) nor their meaning. They are checked once all have come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from lorafleet.protocol.adapter_formats.adapter_files import CHUNK_BYTES, read_buffer
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnavailable
from lorafleet.resolvers.checksum import Checker
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.source import Interrupted, RemoteFile, Source

PART_BYTES = 8 << 20
PARALLEL_PARTS = 8
ATTEMPTS = 6  # attempts in a row without a byte before a source is given up: about 12 s of waiting
FIRST_BACKOFF_S = 0.2
LOG_S = 5.0

logger = logging.getLogger("lorafleet.resolvers")


class ProgressCounters(Protocol):
    """Receives a download's progress and counts it. fetch_metrics.py implements it."""

    def received(self, num_bytes: int) -> None: ...
    def retried(self) -> None: ...


def download(
    source: Source, file: RemoteFile, target: Path, deadline: FetchDeadline, counters: ProgressCounters
) -> None:
    """Fills `target`, which already has the file's size, and checks its content.

    Raises AdapterUnavailable, AdapterChanged or AdapterMalformed if that fails.
    """
    step = PART_BYTES if file.in_ranges else max(file.size, 1)
    parts = [(start, min(start + step, file.size)) for start in range(0, file.size, step)]
    ended = threading.Event()
    progress = _Progress(file, counters)
    fd = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(min(PARALLEL_PARTS, max(len(parts), 1)), thread_name_prefix="fetch") as pool:
            work = [
                pool.submit(_download_part, source, file, part, fd, deadline.until(ended), progress) for part in parts
            ]
            try:
                _await_all(work, deadline)
            finally:
                ended.set()
                for part in work:
                    part.cancel()
    finally:
        os.close(fd)
    _verify(file, target)


def _await_all(work: list[Future[None]], deadline: FetchDeadline) -> None:
    """Raises the parts' first error. Meanwhile checks the deadline, since only it reports a stop from outside."""
    left = set(work)
    while left:
        done, left = wait(left, timeout=min(0.2, deadline.left_s()), return_when=FIRST_EXCEPTION)
        for part in done:
            part.result()


def _download_part(
    source: Source, file: RemoteFile, part: tuple[int, int], fd: int, deadline: FetchDeadline, progress: _Progress
) -> None:
    start, end = part
    position, failures = start, 0
    while position < end:
        try:
            with contextlib.closing(source.read(file, position, end, deadline)) as chunks:
                for chunk in chunks:
                    if position + len(chunk) > end:
                        raise AdapterUnavailable(f"{file.location} sent more bytes than were requested.")
                    _write(fd, chunk, position)
                    position, failures = position + len(chunk), 0
                    progress.received(len(chunk))
                    deadline.left_s()
            if position < end:
                raise Interrupted(f"the answer ended {end - position} bytes early")
        except Interrupted as error:
            failures += 1
            if failures >= ATTEMPTS:
                raise AdapterUnavailable(
                    f"{file.location} cannot be read: {error}. {ATTEMPTS} attempts in a row received no bytes."
                ) from None
            progress.retried(error, position)
            if not file.in_ranges:
                position = start
            deadline.sleep(_backoff_s(failures))


def _backoff_s(failures: int) -> float:
    """Returns a delay that doubles each time, and is random so that a cluster's processes do not retry together."""
    return FIRST_BACKOFF_S * (1 << (failures - 1)) * random.uniform(0.5, 1.5)


def _write(fd: int, chunk: bytes, position: int) -> None:
    left = memoryview(chunk)
    while left:
        count = os.pwrite(fd, left, position)
        left, position = left[count:], position + count


def _verify(file: RemoteFile, path: Path) -> None:
    if file.checksum is None:
        logger.info("%s: its source gives no checksum, so only its size was checked", file.location)
        return
    check = Checker(file.checksum, file.size)
    buffer = memoryview(read_buffer(CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            check.update(buffer[:count])
    if not check.matches():
        raise AdapterMalformed(
            f"{file.location} is damaged: its {file.size} bytes do not match the {file.checksum.kind} "
            f"{file.checksum.value} that its source gives. Upload it again."
        )


class _Progress:
    """The progress of one file. The threads of its parts call it."""

    def __init__(self, file: RemoteFile, counters: ProgressCounters) -> None:
        self._file = file
        self._counters = counters
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._logged_s = time.monotonic()

    def received(self, num_bytes: int) -> None:
        self._counters.received(num_bytes)
        with self._lock:
            self._num_bytes += num_bytes
            due = time.monotonic() - self._logged_s >= LOG_S
            if due:
                self._logged_s = time.monotonic()
        if due:
            logger.info("%s: %d of %d bytes", self._file.location, self._num_bytes, self._file.size)

    def retried(self, error: Interrupted, position: int) -> None:
        self._counters.retried()
        logger.warning("%s: %s; trying again from byte %d", self._file.location, error, position)

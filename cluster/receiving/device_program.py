"""The program of a process that copies pushes out of memory that a trainer shares on the same node.

That memory is a GPU's, opened by CUDA IPC, or POSIX shared memory on a server without a GPU. It is a process of its
own, because a replica's front sees no GPU, and so that a wrong handle cannot harm an engine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec

from lorafleet.cluster.receiving.receiver_messages import (
    ReceiveJob,
    ReceiverReport,
    report,
    reported,
    write_at,
)
from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace
from lorafleet.protocol.cuda_driver import CudaDriver
from lorafleet.protocol.framing import receive
from lorafleet.protocol.shared_segment import open_segment, remove_abandoned_segments
from lorafleet.sandbox.program import settings

CHUNK_BYTES = 8 << 20
IDLE_S = 600.0  # The process ends after this time without a job, and gives its memory on the GPU back.


class SharedMemory(Protocol):
    """Opened memory of a trainer."""

    num_bytes: int

    def read(self, start: int, num_bytes: int) -> memoryview:
        """Returns bytes, which are valid until the next call. The caller checks that they are within the memory."""
        ...


class _GpuMemory:
    def __init__(self, driver: CudaDriver, address: int, num_bytes: int, staging: memoryview) -> None:
        self._driver = driver
        self._address = address
        self._staging = staging
        self.num_bytes = num_bytes

    def read(self, start: int, num_bytes: int) -> memoryview:
        part = self._staging[:num_bytes]
        self._driver.copy_to_host(part, self._address + start)
        return part


class _GpuOpener:
    """Opens handles of one GPU, which must be the only visible one."""

    def __init__(self, device: str) -> None:
        self._driver = CudaDriver()
        found = self._driver.use_first_device()
        if found != device:
            raise ValueError(f"this node does not have the GPU {device}")
        self._staging = self._driver.pinned_memory(CHUNK_BYTES)

    @contextmanager
    def opened(self, handle: bytes) -> Iterator[_GpuMemory]:
        address, num_bytes = self._driver.open_handle(handle)
        try:
            yield _GpuMemory(self._driver, address, num_bytes, self._staging)
        finally:
            self._driver.close_handle(address)


class _HostMemory:
    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.num_bytes = len(content)

    def read(self, start: int, num_bytes: int) -> memoryview:
        return self._content[start : start + num_bytes]


class _HostOpener:
    @contextmanager
    def opened(self, handle: bytes) -> Iterator[_HostMemory]:
        try:
            yield _HostMemory(open_segment(handle))
        finally:
            remove_abandoned_segments()  # The trainer may have been killed meanwhile, or others before.


class Run(NamedTuple):
    """Bytes that are together both in the trainer's memory and in the file."""

    source: int  # Position in the trainer's memory.
    start: int  # Position in the file.
    num_bytes: int


def runs_of(tensors: Sequence[TensorPlace], offset: int) -> list[Run]:
    """Returns the copies for tensors that are one after another in the trainer's memory, from `offset` on."""
    runs: list[Run] = []
    for tensor in tensors:
        if runs and runs[-1].start + runs[-1].num_bytes == tensor.start:
            runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + tensor.num_bytes)
        else:
            runs.append(Run(offset, tensor.start, tensor.num_bytes))
        offset += tensor.num_bytes
    return runs


def main() -> None:
    server, device = socket.socket(fileno=0), settings()["device"]
    server.settimeout(IDLE_S)
    with reported(server):
        opener = _HostOpener() if device == "cpu" else _GpuOpener(device)
    while (message := _next_job(server)) is not None:
        with reported(server):
            _copy(server, opener, msgspec.json.decode(message, type=ReceiveJob))
    if device == "cpu":
        remove_abandoned_segments()


def _next_job(server: socket.socket) -> bytearray | None:
    try:
        return receive(server)
    except TimeoutError:
        return None


def _copy(server: socket.socket, opener: _GpuOpener | _HostOpener, job: ReceiveJob) -> None:
    runs = runs_of(job.tensors, job.offset)
    memory = os.open(job.memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        with opener.opened(bytes.fromhex(job.handle)) as shared:
            end = runs[-1].source + runs[-1].num_bytes
            if end > shared.num_bytes:
                raise ValueError(f"the tensors end at byte {end}; the handle's memory has {shared.num_bytes}")
            for run, first_missing in zip(runs, _first_missing(runs), strict=True):
                for begin in range(0, run.num_bytes, CHUNK_BYTES):
                    num_bytes = min(CHUNK_BYTES, run.num_bytes - begin)
                    write_at(memory, shared.read(run.source + begin, num_bytes), run.start + begin)
                    if run.start == first_missing:
                        report(server, ReceiverReport(run.start + begin + num_bytes))
        report(server, ReceiverReport(job.file_bytes))
    finally:
        os.close(memory)


def _first_missing(runs: Sequence[Run]) -> list[int]:
    """Returns for each run the first position in the file that is not written before it."""
    found = list(accumulate((run.start for run in reversed(runs)), min))
    return found[::-1]


if __name__ == "__main__":
    main()

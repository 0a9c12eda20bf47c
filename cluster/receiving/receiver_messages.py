"""The messages between a replica and a process that receives the tensors of a push for it, as JSON.

The process writes the tensors into memory of the replica (adapter_formats/sealed_memory.py), and says how far it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace
from lorafleet.protocol.framing import send

MAX_REPORT_BYTES = 64 << 10


class ReceiveJob(msgspec.Struct, frozen=True):
    """One push that a process is to receive."""

    memory: str  # Path of the memory that the tensors are written to.
    file_bytes: int  # Size of the safetensors file there.
    tensors: tuple[TensorPlace, ...]  # In the order in which they come.
    handle: str = ""  # The same as AnnouncedPush.handle.
    offset: int = 0


class ReceiverReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a process about its present job, or about its start."""

    num_bytes: int = 0  # The file is complete from its beginning up to here.
    has_ended: bool = False
    error: str = ""  # Why the job has failed; "" if it has not.


def report(sock: socket.socket, said: ReceiverReport) -> None:
    send(sock, msgspec.json.encode(said))


@contextmanager
def reported(sock: socket.socket) -> Iterator[None]:
    """Reports that the job inside has ended. If it fails, reports its error and ends the program."""
    try:
        yield
    except Exception as error:
        report(sock, ReceiverReport(has_ended=True, error=_error_text(error)))
        raise SystemExit from None
    report(sock, ReceiverReport(has_ended=True))


def _error_text(error: Exception) -> str:
    """Returns the error's message on one line, of a length that fits in an answer."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500]


def write_at(descriptor: int, data: memoryview, start: int) -> None:
    """Writes all bytes to the memory, from this position on."""
    while len(data):
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written

"""Messages on a stream: the length in four bytes, then as many bytes. Both ends of our sockets use this file."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
_PART_BYTES = 1 << 20


class FrameTooLarge(Exception):
    """An error that means that the other end announces a message that is larger than allowed."""


def framed(message: bytes) -> bytes:
    """Returns the message with its length in front."""
    return _LENGTH.pack(len(message)) + message


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket, max_bytes: int | None = None, deadline_s: float | None = None) -> bytearray | None:
    """Returns the next message, or None once the other end has closed the socket.

    Raises FrameTooLarge if the message is larger than max_bytes, and TimeoutError if it is not complete at deadline_s,
    a time of time.monotonic().
    """
    head = _exactly(sock, _LENGTH.size, deadline_s)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    _check_size(size, max_bytes)
    return _exactly(sock, size, deadline_s)


class FrameCutter:
    """Cuts a stream into messages, for event loops."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # Size of a message; may be changed between two messages.
        self._buffer = bytearray()

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yields the complete messages. The iterator must be exhausted before the next call. Raises FrameTooLarge."""
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) >= begin + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, begin)
            _check_size(size, self.max_bytes)
            end = begin + _LENGTH.size + size
            if len(buffer) < end:
                break
            message = bytes(buffer[begin + _LENGTH.size : end])
            begin = end
            yield message
        del buffer[:begin]


def _check_size(size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise FrameTooLarge(f"a frame of {size} bytes; {max_bytes} are allowed")


def _exactly(sock: socket.socket, size: int, deadline_s: float | None) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        if deadline_s is not None:
            sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        part = sock.recv(min(size - len(data), _PART_BYTES))
        if not part:
            return None
        data += part
    return data

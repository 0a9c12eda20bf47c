"""Messages between a server's process and a sandboxed process: a length, then as many bytes. Both ends use this
file."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("<Q")  # Precedes each message.
_PART_BYTES = 1 << 20


def framed(message: bytes) -> bytes:
    """Returns the message with its length in front."""
    return LENGTH.pack(len(message)) + message


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket) -> bytes | None:
    """Returns the next message, or None once the other end has closed the socket."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = sock.recv(min(size, _PART_BYTES))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

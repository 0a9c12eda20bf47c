"""Messages with their lengths in front: on sockets, and cut out of a stream that comes in any pieces."""

from __future__ import annotations

import socket
import time

import pytest

from lorafleet.protocol.framing import FrameCutter, FrameTooLarge, framed, receive, send

MESSAGES = [b"", b"x", bytes(range(256)) * 10]


@pytest.mark.parametrize("piece_bytes", [1, 3, 5, 10_000])
def test_a_stream_is_cut_where_its_messages_end(piece_bytes: int) -> None:
    stream, cutter = b"".join(map(framed, MESSAGES)), FrameCutter(10_000)
    pieces = [stream[begin : begin + piece_bytes] for begin in range(0, len(stream), piece_bytes)]
    assert [message for piece in pieces for message in cutter.cut(piece)] == MESSAGES


def test_a_message_that_is_too_large_is_rejected_before_its_bytes_come() -> None:
    cutter = FrameCutter(10)
    assert list(cutter.cut(framed(bytes(10)))) == [bytes(10)]
    with pytest.raises(FrameTooLarge, match="a frame of 11 bytes; 10 are allowed"):
        list(cutter.cut(framed(bytes(11))[:4]))


def test_messages_pass_a_socket_until_it_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            for message in MESSAGES:
                send(ours, message)
            ours.sendall(framed(b"cut short")[:-1])
        assert [receive(theirs) for _ in MESSAGES] == MESSAGES
        assert receive(theirs) is None and receive(theirs) is None


def test_a_socket_s_message_is_bounded_in_size_and_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, bytes(11))
        with pytest.raises(FrameTooLarge):
            receive(theirs, max_bytes=10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(b"late")[:-1])
        with pytest.raises(TimeoutError):
            receive(theirs, deadline_s=time.monotonic())

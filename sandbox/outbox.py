"""Sends messages to a sandboxed process without ever waiting for it.

A process that is stopped or slow leaves its socket full. Bytes that the socket does not accept at once are stored
here, and a thread sends them. The caller must bound what it adds, by num_unsent_bytes.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from lorafleet.protocol.framing import framed


class Outbox:
    def __init__(self, sock: socket.socket) -> None:
        self.num_unsent_bytes = 0
        self._socket = sock
        self._unsent: deque[bytes] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._sender = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._sender.start()

    def send(self, message: bytes) -> None:
        """Sends the message, or does nothing once either end has closed the socket: the reader of the socket notices
        that."""
        frame = framed(message)
        with self._changed:
            if self._is_closed:
                return
            if not self._unsent:
                frame = frame[self._send_now(frame) :]
            if frame:
                self._unsent.append(frame)
                self.num_unsent_bytes += len(frame)
                self._changed.notify()

    def close(self) -> None:
        """Stops the sending thread. Shut down the socket first, or else this waits for the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._sender.join()

    def _send_now(self, frame: bytes) -> int:
        """Returns the number of bytes that the socket has accepted."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the other end has closed it
            return len(frame)

    def _run(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._socket.sendall(frame)
            except OSError:  # the other end has closed it
                return
            with self._changed:
                self._unsent.popleft()
                self.num_unsent_bytes -= len(frame)

    def _next(self) -> bytes | None:
        """Waits for a frame. Leaves it in the queue, so that no later frame overtakes it. Returns None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._is_closed)
            return None if self._is_closed else self._unsent[0]

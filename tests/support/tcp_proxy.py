"""Provides a TCP proxy that makes a healthy server slow, or cuts its answers short."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

CHUNK_BYTES = 64 << 10


class TCPProxy:
    """Forwards connections to a port; its settings may be changed while it runs."""

    def __init__(self, port: int) -> None:
        self.cut_after_bytes: int | None = None  # The connection is closed after this many bytes of an answer.
        self.bytes_per_s: float | None = None  # The rate of each connection.
        self.num_bytes = 0  # Bytes that the server has sent.
        self._target = port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # The listener or a connection was closed.
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            threading.Thread(target=self._forward_requests, args=(client, server), daemon=True).start()
            sent = 0
            while data := server.recv(CHUNK_BYTES):
                client.sendall(data)
                sent += len(data)
                with self._lock:
                    self.num_bytes += len(data)
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                if self.cut_after_bytes is not None and sent >= self.cut_after_bytes:
                    break
            for connection in (client, server):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK_BYTES):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

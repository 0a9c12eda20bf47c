"""Sends adapters from this node's cache to other nodes, which neighbor_fetch.py fetches.

It runs in a few threads of a replica's front. The kernel copies the files into the connection, so the threads hardly
hold Python's lock. A connection must show the secret first. Everything that a stranger can cause is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorafleet.protocol.adapter_formats.adapter_files import stored_files
from lorafleet.protocol.framing import FrameTooLarge, receive, send
from lorafleet.resolvers.neighbor_wire import MAX_REQUEST_BYTES, NeighborOffer, encoder, request_decoder
from lorafleet.resolvers.source import wanted_names

SENDS = 4  # Adapters that are sent at a time; more neighbors get "busy" and ask others.
CONNECTIONS = 32  # Connections at a time, with those that have not shown the secret.
REQUEST_S = 2.0  # Seconds in which a connection must show the secret and name an adapter.
SEND_S = 10.0  # Seconds that a send may take, in addition to those for the bytes sent until then.
LEAST_BYTES_S = 20e6  # A neighbor that receives fewer bytes per second after SEND_S is cut off.
CHUNK_BYTES = 4 << 20
ACCEPT_AGAIN_S = 0.1  # Seconds until connections are accepted again when the system has no descriptor or memory left.
_DISCARD = struct.pack("ii", 1, 0)  # Has the kernel discard what it has not sent when the connection is closed.
OUTCOMES = ("sent", "absent", "busy", "broken", "rejected")

Cached = Callable[[str], AbstractContextManager[Path | None]]  # Holds an adapter's folder, or None if it is not there.

logger = logging.getLogger("lorafleet.resolvers")


class NeighborServer(Collector):
    """Answers neighbors until close().

    Args:
        listener: A socket that listens.
        cached: Returns the adapter's folder in the node's cache, by digest.
        sends: Adapters that are sent at a time.
        send_s: As SEND_S.
    """

    def __init__(
        self, listener: socket.socket, secret: str, cached: Cached, sends: int = SENDS, send_s: float = SEND_S
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._cached = cached
        self._send_s = send_s
        self._sending = threading.BoundedSemaphore(sends)
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="neighbors")
        self._registry = CollectorRegistry()
        self._outcomes = Counter(
            "lorafleet_neighbor_sends",
            "Adapters that other nodes requested from this node's cache, by outcome.",
            ["outcome"],
            registry=self._registry,
        )
        self._bytes = Counter(
            "lorafleet_neighbor_sent_bytes", "Bytes of adapters sent to other nodes.", registry=self._registry
        )
        for outcome in OUTCOMES:
            self._outcomes.labels(outcome)
        self._is_closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="neighbors-accept", daemon=True)
        self._accepting.start()

    def collect(self) -> Iterator[Metric]:
        return iter(self._registry.collect())

    def close(self) -> None:
        """Accepts no further connections. Adapters that are being sent are sent to their end."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # It wakes the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed.wait(ACCEPT_AGAIN_S):
                    return
                logger.warning("a neighbor's connection cannot be accepted: %s", error)
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            self._pool.submit(self._serve, connection).add_done_callback(lambda _: self._connections.release())

    def _serve(self, connection: socket.socket) -> None:
        outcome = "broken"
        try:
            with connection:
                outcome = self._answer(connection)
        except (OSError, FrameTooLarge, msgspec.MsgspecError) as error:
            logger.warning("a neighbor's connection ended early: %s", error)
        except Exception:
            logger.exception("a neighbor cannot be answered")
        self._outcomes.labels(outcome).inc()

    def _answer(self, connection: socket.socket) -> str:
        """Answers the connection's only request, and returns the outcome."""
        frame = receive(connection, MAX_REQUEST_BYTES, time.monotonic() + REQUEST_S)
        if frame is None:
            return "broken"
        request = request_decoder.decode(frame)
        if not secrets.compare_digest(request.secret.encode(), self._secret.encode()):
            logger.warning("a connection to the neighbors' port has shown a wrong secret")
            return "rejected"
        if not self._sending.acquire(blocking=False):
            send(connection, encoder.encode(NeighborOffer(refusal="busy")))
            return "busy"
        try:
            with self._cached(request.digest) as folder:
                if folder is None:
                    send(connection, encoder.encode(NeighborOffer(refusal="absent")))
                    return "absent"
                self._send(connection, folder)
                return "sent"
        finally:
            self._sending.release()

    def _send(self, connection: socket.socket, folder: Path) -> None:
        with ExitStack() as stack:
            names = wanted_names(list(stored_files(folder)), str(folder))
            files: dict[str, BinaryIO] = {name: stack.enter_context((folder / name).open("rb")) for name in names}
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
            send(connection, encoder.encode(NeighborOffer(sizes)))
            ends_s = time.monotonic() + self._send_s
            for name, file in files.items():
                ends_s = self._send_file(connection, file, sizes[name], ends_s)

    def _send_file(self, connection: socket.socket, file: BinaryIO, size: int, ends_s: float) -> float:
        """Sends a file, and returns when the bytes after it must have been received, a time of time.monotonic().

        ends_s is that time for the file's first bytes. Each byte sent puts it off by the time of the minimum rate, so a
        neighbor that trickles is cut off however large the file is. Raises TimeoutError.
        """
        connection.settimeout(0.0)
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        num_sent = 0
        while num_sent < size:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not writable.poll(1000 * left_s):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
                raise TimeoutError(f"it receives less than {LEAST_BYTES_S:.0f} bytes per second")
            with contextlib.suppress(BlockingIOError):
                count = os.sendfile(connection.fileno(), file.fileno(), num_sent, min(CHUNK_BYTES, size - num_sent))
                if count == 0:
                    raise OSError(f"the file {file.name} has become shorter")
                num_sent += count
                ends_s += count / LEAST_BYTES_S
                self._bytes.inc(count)
        return ends_s

"""Fetches an adapter from the cache of another node, which is tried before the adapter's source.

A neighbor can only save time. What it sends is used if it has the digest that was asked for, and if a neighbor is
slow, busy or wrong, the source is asked as if there were no neighbors. Each attempt is counted by its outcome.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lorafleet.protocol.adapter_formats.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    OPTIONAL_NAMES,
    SAFETENSORS_NAME,
    read_buffer,
)
from lorafleet.protocol.errors import AdapterError, AdapterTooLarge, AdapterUnavailable
from lorafleet.protocol.framing import FrameTooLarge, receive, send
from lorafleet.resolvers.cache import AdapterCache
from lorafleet.resolvers.deadline import STOP_POLL_S, FetchDeadline
from lorafleet.resolvers.fetch_metrics import NEIGHBOR, FetchMetrics
from lorafleet.resolvers.neighbor_wire import (
    MAX_OFFER_BYTES,
    NeighborAddress,
    NeighborOffer,
    NeighborRequest,
    encoder,
    offer_decoder,
)

BUFFER_BYTES = 1 << 20
_FILES = {CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, *OPTIONAL_NAMES}

FindNeighbors = Callable[[str], Sequence[NeighborAddress]]  # By digest; it may raise, and must not wait for long.

logger = logging.getLogger("lorafleet.resolvers")


@dataclass(frozen=True, slots=True)
class NeighborLimits:
    """The time that a neighbor may cost before the source is asked."""

    most_tried: int = 2  # Neighbors that are asked for one adapter.
    offer_s: float = 2.0  # Seconds until the connection stands and the files are announced.
    least_bytes_s: float = 50e6  # Bytes per second below which a neighbor is given up.
    share: float = 0.5  # Part of the fetch's time that all neighbors together may use. The rest is the source's.


LIMITS = NeighborLimits()


class NeighborFailed(Exception):
    """Means that a neighbor has not delivered the adapter. `outcome` is the cause that metrics name."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class NeighborFetcher:
    """Fetches adapters from neighbors into the node's cache.

    Args:
        find: Returns the addresses of the neighbors that probably have an adapter, the best first.
    """

    def __init__(self, find: FindNeighbors, metrics: FetchMetrics, limits: NeighborLimits = LIMITS) -> None:
        self._find = find
        self._metrics = metrics
        self._limits = limits

    def fetch(self, digest: str, cache: AdapterCache, max_bytes: int, deadline: FetchDeadline) -> bool:
        """Returns whether the adapter is in the cache now. Raises AdapterUnavailable when the process is ending.

        max_bytes limits the size of the adapter's files together. The caller holds the lock of the adapter's source.
        """
        ends_s = time.monotonic() + deadline.left_s() * self._limits.share
        for address in self._found(digest):
            started = time.monotonic()
            try:
                num_bytes = self._fetch_from(address, digest, cache, max_bytes, deadline, ends_s)
            except NeighborFailed as failed:
                deadline.left_s()
                logger.warning("adapter %s: neighbor %s has not sent it: %s", digest[:12], address.host, failed)
                self._metrics.ended(NEIGHBOR, failed.outcome, time.monotonic() - started, digest, 0)
                continue
            seconds = time.monotonic() - started
            self._metrics.ended(NEIGHBOR, "fetched", seconds, digest, num_bytes)
            logger.info("fetched adapter %s from neighbor %s in %.2f s", digest[:12], address.host, seconds)
            return True
        return False

    def _found(self, digest: str) -> Sequence[NeighborAddress]:
        try:
            found = self._find(digest)
        except Exception as error:  # The directory is being restarted, or is slow.
            logger.warning("adapter %s: no neighbor is known, since the directory failed: %r", digest[:12], error)
            self._metrics.ended(NEIGHBOR, "unknown", 0.0, digest, 0)
            return []
        if not found:
            self._metrics.ended(NEIGHBOR, "nobody", 0.0, digest, 0)
        return found[: self._limits.most_tried]

    def _fetch_from(
        self,
        address: NeighborAddress,
        digest: str,
        cache: AdapterCache,
        max_bytes: int,
        deadline: FetchDeadline,
        ends_s: float,
    ) -> int:
        """Returns the number of bytes. Raises NeighborFailed, at the latest at ends_s, a time of time.monotonic()."""
        offer_ends_s = min(time.monotonic() + self._limits.offer_s, ends_s)
        try:
            with socket.create_connection((address.host, address.port), timeout=_left_s(offer_ends_s)) as sock:
                send(sock, encoder.encode(NeighborRequest(address.secret, digest)))
                sizes = _checked(_offer(sock, offer_ends_s), max_bytes)
                num_bytes = sum(sizes.values())
                files_s = self._limits.offer_s + num_bytes / self._limits.least_bytes_s
                ends_s = min(time.monotonic() + files_s, ends_s)
                with cache.draft(sizes, deadline) as draft:
                    for name, size in sizes.items():
                        self._receive_file(sock, draft / name, size, ends_s, deadline)
                    cache.publish(draft, None, expected=digest)
                return num_bytes
        except TimeoutError:
            raise NeighborFailed("slow", "it was too slow") from None
        except OSError as error:
            raise NeighborFailed("broken", f"the connection broke, or the bytes cannot be written: {error}") from error
        except (FrameTooLarge, msgspec.MsgspecError) as error:
            raise NeighborFailed("damaged", f"its answer cannot be read: {error}") from error
        except (AdapterUnavailable, AdapterTooLarge) as error:
            raise NeighborFailed("no_room", error.message) from error
        except AdapterError as error:
            raise NeighborFailed("damaged", error.message) from error

    def _receive_file(
        self, sock: socket.socket, target: Path, size: int, ends_s: float, deadline: FetchDeadline
    ) -> None:
        """Fills `target` with the next bytes. Raises TimeoutError at ends_s, a time of time.monotonic()."""
        buffer = memoryview(read_buffer(BUFFER_BYTES))
        progress = self._metrics.progress_of(NEIGHBOR)
        with target.open("r+b", buffering=0) as file:
            while size > 0:
                count = _receive_some(sock, buffer[: min(size, len(buffer))], ends_s, deadline)
                _write_all(file.fileno(), buffer[:count])
                progress.received(count)
                size -= count


def _left_s(ends_s: float) -> float:
    """Returns the seconds until ends_s. Raises TimeoutError if there are none."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _offer(sock: socket.socket, ends_s: float) -> NeighborOffer:
    frame = receive(sock, MAX_OFFER_BYTES, ends_s)
    if frame is None:
        raise ConnectionResetError("it was closed before the answer")
    return offer_decoder.decode(frame)


def _checked(offer: NeighborOffer, max_bytes: int) -> Mapping[str, int]:
    """Returns the sizes of the offered files. Raises NeighborFailed if they are refused, or not an adapter's."""
    if offer.refusal:
        outcome = offer.refusal if offer.refusal in ("absent", "busy") else "damaged"
        raise NeighborFailed(outcome, f"it answered {offer.refusal!r}")
    sizes = offer.sizes
    if CONFIG_NAME not in sizes or not sizes.keys() <= _FILES or min(sizes.values()) < 0:
        raise NeighborFailed("damaged", f"it offers the files {sorted(sizes)[:10]}")
    if sizes[CONFIG_NAME] > MAX_CONFIG_BYTES or sum(sizes.values()) > max_bytes:
        raise NeighborFailed("too_large", f"it offers {sum(sizes.values())} bytes; at most {max_bytes} are fetched")
    return sizes


def _receive_some(sock: socket.socket, buffer: memoryview, ends_s: float, deadline: FetchDeadline) -> int:
    while True:
        deadline.left_s()
        sock.settimeout(min(_left_s(ends_s), STOP_POLL_S))
        try:
            count = sock.recv_into(buffer)
        except TimeoutError:
            continue
        if count == 0:
            raise ConnectionResetError("it was closed early")
        return count


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]

"""Counts the requests that one replica is answering, and rejects new ones once the server ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lorafleet.protocol.errors import Overloaded

AGAIN_S = 5.0  # Seconds after which clients may find another server.


class RequestsInProgress:
    def __init__(self) -> None:
        self.num = 0  # Requests whose answers are not sent yet, except lines of batches.
        self.is_ending = False

    def check(self) -> None:
        """Raises Overloaded if the server ends."""
        if self.is_ending:
            raise Overloaded(
                "This server is being stopped: it finishes the answers that it has begun and takes no more requests. "
                "Send the request again when the server is back, or to another one.",
                retry_after_s=AGAIN_S,
            )

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.num += 1
        try:
            yield
        finally:
            self.num -= 1

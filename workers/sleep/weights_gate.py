"""Keeps loads of adapters from reading the base's weights while these are not in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lorafleet.protocol.errors import Overloaded


class WeightsGate:
    """The access of loading threads to the base's weights. It is open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_open = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Holds the weights in memory. Raises Overloaded if they are not there."""
        with self._changed:
            if not self._is_open:
                raise Overloaded(
                    "this adapter is computed from the base's weights, which are asleep. Wake them up first "
                    "(/wake_up?tags=weights)."
                )
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Lets nobody in, and waits until those that are in have left."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: self._num_readers == 0)

    def open(self) -> None:
        with self._changed:
            self._is_open = True
